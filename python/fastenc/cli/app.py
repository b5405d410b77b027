"""The commands and their help; the work is in commands.py and info.py."""

from pathlib import Path
from typing import Annotated

import typer

from fastenc.cli import commands, corpus, info, measure, recipes
from fastenc.cli.options import with_task_options
from fastenc.data.cleaning import STEPS
from fastenc.data.languages import ALPHA
from fastenc.data.store_writer import SHARD_CHARACTERS
from fastenc.models.adaptations import LORA_TARGETS, Lora
from fastenc.tasks import TASKS

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Pretrain, fine-tune and run encoders of the BERT family, without paying for padding.",
)

# Options that the two training commands share.
Output = Annotated[
    Path, typer.Option("--output", "-o", help="Folder for checkpoints, log, curves and the model.")
]
Epochs = Annotated[int, typer.Option(help="Passes over the data.")]
MaxSteps = Annotated[int | None, typer.Option(help="Optimiser steps; counts instead of --epochs.")]
BatchSize = Annotated[int, typer.Option(help="Sequences a batch and process.")]
Accumulation = Annotated[int, typer.Option(help="Batches an optimiser step and process.")]
GlobalBatchSize = Annotated[
    int | None,
    typer.Option(
        help="Sequences an optimiser step, over all processes; counts instead of --accumulation."
    ),
]
LearningRate = Annotated[
    float, typer.Option("--learning-rate", "--lr", help="Peak learning rate of AdamW.")
]
Warmup = Annotated[float, typer.Option(help="Share of the steps with rising learning rate.")]
WarmupSteps = Annotated[int | None, typer.Option(help="Their number; counts instead of --warmup.")]
WeightDecay = Annotated[float, typer.Option(help="Weight decay of matrices.")]
Betas = Annotated[tuple[float, float], typer.Option(help="Adam's decay rates of its two means.")]
AdamEps = Annotated[float, typer.Option(help="Adam's epsilon.")]
MaxGradNorm = Annotated[
    float, typer.Option(help="Norm that the gradient is scaled down to; 0: whatever it is.")
]
Parallel = Annotated[
    str,
    typer.Option(
        help="What each process holds: ddp, the whole model, or fsdp, a shard of weights, gradients and moments."
    ),
]
Precision = Annotated[str, typer.Option(help="fp32, or bf16 for autocast over fp32 weights.")]
Seed = Annotated[int, typer.Option(help="Seed of initial weights, data order, masks and dropout.")]
EvalEvery = Annotated[
    int | None,
    typer.Option(
        help="Steps between evaluations; default: every epoch, every quarter of a long one."
    ),
]
SaveEvery = Annotated[int | None, typer.Option(help="Steps between further checkpoints.")]
Track = Annotated[
    list[str] | None,
    typer.Option(
        help="Where the log goes beside log.jsonl: tensorboard or wandb; may be repeated."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest checkpoint in --output.")
]


@app.command()
def pretrain(
    context: typer.Context,
    train: Annotated[
        list[str],
        typer.Argument(
            help="Texts: .txt, .tsv, .csv, .jsonl (.gz), or a data set; or a store of `fastenc prepare`."
        ),
    ],
    output: Output,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Published settings by name, or a .toml file; other options override it. list: show the names.",
            is_eager=True,
            callback=recipes.use_recipe,
        ),
    ] = None,
    dev: Annotated[
        str | None,
        typer.Option(
            help="Held-out texts; default: one in twenty documents, or of a store's examples."
        ),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="Column of the text in a table. Default: text.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Checkpoint folder or hub name to go on from.")
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            help="Kind to train (wordpiece, bpe or unigram), or a folder with a tokenizer.json; not for a store."
        ),
    ] = "wordpiece",
    vocab_size: Annotated[int, typer.Option(help="Tokens of the trained vocabulary.")] = 16000,
    lowercase: Annotated[
        bool | None,
        typer.Option(
            "--lowercase/--cased",
            help="Whether the trained vocabulary is of small letters without accents. Default: for wordpiece.",
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            help="Of a new model: bert, roberta, xlm-roberta, distilbert or electra. Default: the objective's."
        ),
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of a new model.")] = 6,
    hidden: Annotated[int, typer.Option(help="Width of a new model.")] = 384,
    heads: Annotated[int, typer.Option(help="Attention heads of a new model.")] = 12,
    intermediate: Annotated[
        int | None, typer.Option(help="Inner width of a new model's layers. Default: 4 * --hidden.")
    ] = None,
    embedding_size: Annotated[
        int | None, typer.Option(help="Width of a new ELECTRA's embeddings. Default: --hidden.")
    ] = None,
    generator_size: Annotated[
        float | None,
        typer.Option(help="A new ELECTRA's generator, as a share of its width. Default: 0.25."),
    ] = None,
    dropout: Annotated[float, typer.Option(help="Of a new model, in attention too.")] = 0.1,
    norm_eps: Annotated[float, typer.Option(help="Epsilon of a new model's norms.")] = 1e-12,
    objective: Annotated[
        str,
        typer.Option(help="What is predicted: mlm, mlm+nsp, mlm+sop, span, electra or distill."),
    ] = "mlm",
    teacher: Annotated[
        str | None, typer.Option(help="Masked LM to distill: checkpoint folder or hub name.")
    ] = None,
    packing: Annotated[
        str | None,
        typer.Option(
            help="full-sentences, doc-sentences or segment-pairs. Default: the objective's."
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a training sequence.")] = 512,
    probability: Annotated[float, typer.Option(help="Share of tokens to predict.")] = 0.15,
    replacement: Annotated[
        str, typer.Option(help="Random tokens: uniform, or by unigram frequency.")
    ] = "uniform",
    whole_word: Annotated[bool, typer.Option("--whole-word", help="Mask whole words.")] = False,
    static: Annotated[
        bool, typer.Option("--static", help="The same mask for a sequence in every epoch.")
    ] = False,
    alpha: Annotated[
        float, typer.Option(help="Smoothing of a store's languages: 1 samples them by size.")
    ] = ALPHA,
    epochs: Epochs = 3,
    max_steps: MaxSteps = None,
    batch_size: BatchSize = 16,
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens a batch and process, at most; counts instead of --batch-size."),
    ] = None,
    accumulation: Accumulation = 1,
    global_batch_size: GlobalBatchSize = None,
    learning_rate: LearningRate = 5e-4,
    warmup: Warmup = 0.06,
    warmup_steps: WarmupSteps = None,
    betas: Betas = (0.9, 0.999),
    adam_eps: AdamEps = 1e-8,
    weight_decay: WeightDecay = 0.01,
    max_grad_norm: MaxGradNorm = 1.0,
    parallel: Parallel = "ddp",
    precision: Precision = "fp32",
    seed: Seed = 0,
    eval_every: EvalEvery = None,
    save_every: SaveEvery = None,
    track: Track = None,
    resume: Resume = False,
) -> None:
    """Train a masked language model on text, with the objective chosen.

    Without --from, a tokenizer is trained on the text first, then a BERT of the given size. The result is a folder
    that transformers loads.

    Objectives: mlm; mlm+nsp, next-sentence prediction beside it (BERT); mlm+sop, sentence order (ALBERT);
    span, spans of words predicted from inside and from their boundaries (SpanBERT); electra,
    tokens that a small masked LM replaced are told from the others (ELECTRA); distill, a teacher's
    predictions, by a student with --layers of its layers (DistilBERT).

    Examples:

    - `fastenc pretrain wiki.txt.gz -o runs/small`

    - `fastenc pretrain wiki.txt.gz -o runs/base --layers 12 --hidden 768 --precision bf16 --accumulation 16`

    - `fastenc pretrain wiki.txt.gz --objective mlm+sop -o runs/pairs`

    - `fastenc pretrain wiki.txt.gz --objective distill --teacher runs/base --layers 6 -o runs/half`

    - `fastenc pretrain books.txt.gz --recipe roberta-base --global-batch-size 256 --max-steps 50000
      --warmup-steps 3000 -o runs/books` (the published settings but three)

    - `fastenc pretrain more.txt --from runs/small -o runs/adapted --lr 1e-4 --whole-word`

    - `fastenc pretrain store/ --batch-tokens 16384 -o runs/large`

    - `torchrun --nproc-per-node 8 -m fastenc.cli pretrain wiki.txt.gz --recipe roberta-base --parallel fsdp -o runs/r`
      (a process for each GPU)
    """
    settings = recipes.give_way(context, _settings(locals()))
    commands.check_tokenizer_options(train, recipes.given(context))
    commands.pretrain(
        train,
        dev,
        column,
        start,
        commands.NewModel(
            tokenizer,
            vocab_size,
            lowercase,
            family,
            layers,
            hidden,
            heads,
            intermediate,
            embedding_size,
            generator_size,
            dropout,
            norm_eps,
        ),
        commands.Examples(
            objective,
            teacher,
            packing,
            block_size,
            probability,
            replacement,
            whole_word,
            static,
            alpha,
        ),
        settings,
        recipes.resolved(context),
        resume,
    )


Column = Annotated[str | None, typer.Option(help="Column of the text in a table. Default: text.")]
Languages = Annotated[
    list[str] | None,
    typer.Option(
        "--language", help="name=file or name=folder, once or more for each of several languages."
    ),
]
Texts = Annotated[
    list[str] | None,
    typer.Argument(help="Texts: .txt, .tsv, .csv, .jsonl (.gz), folders of them, or a data set."),
]


@app.command()
def tokenizer(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the tokenizer.")],
    texts: Texts = None,
    language: Languages = None,
    column: Column = None,
    kind: Annotated[str, typer.Option(help="wordpiece, bpe or unigram.")] = "wordpiece",
    vocab_size: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 16000,
    lowercase: Annotated[
        bool | None,
        typer.Option(
            "--lowercase/--cased", help="Default: lower case for wordpiece of one language."
        ),
    ] = None,
    alpha: Annotated[
        float, typer.Option(help="Smoothing of the languages' shares: 1 keeps their sizes.")
    ] = ALPHA,
    seed: Annotated[int, typer.Option(help="Seed of the languages' lines.")] = 0,
) -> None:
    """Train a tokenizer on texts, or on several languages of unequal size.

    With --language the lines of each are drawn with probability p^alpha / sum p^alpha, p being its share of all
    characters, so that small languages get more of the vocabulary.

    Examples:

    - `fastenc tokenizer wiki.txt.gz -o tokenizer`

    - `fastenc tokenizer --language en=en.txt.gz --language mt=maltese/ --kind unigram -o tokenizer`
    """
    corpus.tokenizer(
        texts, language, column, output, kind, vocab_size, lowercase, alpha=alpha, seed=seed
    )


@app.command()
def tokens(
    tokenizers: Annotated[
        list[str], typer.Argument(help="Folders with a tokenizer.json, of tokenizers or models.")
    ],
    language: Languages = None,
    column: Column = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for tokens.json and tokens.png.")
    ] = Path("tokens"),
) -> None:
    """Count tokens per word, and characters per token, of every language and tokenizer.

    A word is a run of letters, marks and digits by Unicode's default word boundaries (UAX 29). Scripts without spaces
    (Han, Kana, Thai, Lao, Tibetan, Myanmar, Khmer) have characters per token only.

    Example: `fastenc tokens tokenizer other --language en=en.txt --language th=th.txt`
    """
    corpus.tokens(tokenizers, language, column, output)


@app.command()
def clean(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the texts (.jsonl) and report.json.")
    ],
    texts: Texts = None,
    language: Languages = None,
    column: Column = None,
    steps: Annotated[
        str, typer.Option(help="Which of exact, c4, gopher and near, with commas between.")
    ] = ",".join(STEPS),
    threshold: Annotated[
        float, typer.Option(help="Similarity from which documents are near duplicates.")
    ] = 0.8,
    english: Annotated[
        bool, typer.Option("--english", help="Also ask for two of Gopher's English stop words.")
    ] = False,
    bad_words: Annotated[
        Path | None, typer.Option(help="File of words, one a line, that drop a document.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a cleaning of --output that was killed.")
    ] = False,
) -> None:
    """Drop duplicates and text that is none, by the rules of C4 and Gopher, and report what and why.

    Examples:

    - `fastenc clean crawl.jsonl.gz -o clean --english`

    - `fastenc clean --language en=en/ --language mt=mt/ --steps exact,near -o clean`
    """
    corpus.clean(
        texts, language, column, output, steps.split(","), threshold, english, bad_words, resume
    )


@app.command()
def prepare(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the store.")],
    tokenizer: Annotated[str, typer.Option(help="Folder with a tokenizer.json.")],
    texts: Texts = None,
    language: Languages = None,
    column: Column = None,
    processes: Annotated[int, typer.Option(help="Processes that tokenise.")] = 1,
    shard_characters: Annotated[
        int, typer.Option(help="Characters of text a shard.")
    ] = SHARD_CHARACTERS,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a store that was begun in --output.")
    ] = False,
) -> None:
    """Tokenise texts into a store on disk, which `fastenc pretrain` reads without loading it.

    Examples:

    - `fastenc prepare corpus/ --tokenizer tokenizer --processes 8 -o store`

    - `fastenc prepare --language en=en/ --language mt=mt/ --tokenizer tokenizer -o store`
    """
    corpus.prepare(texts, language, column, output, tokenizer, processes, shard_characters, resume)


@app.command(name="recipes")
def show_recipes() -> None:
    """The published settings that `fastenc pretrain --recipe` knows; their files name the source of each value."""
    recipes.show_recipes()


@app.command()
@with_task_options(predict=False)
def finetune(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub name.")],
    train: Annotated[
        str,
        typer.Argument(
            help="Labelled data: .tsv, .csv, .jsonl (.gz) or a data set; CoNLL columns or .conllu for tokens; "
            "columns or .jsonl with tokens and entities for spans."
        ),
    ],
    output: Output,
    task: Annotated[
        str, typer.Option(help=f"What to learn: {', '.join(TASKS)}.")
    ] = "sequence-classification",
    dev: Annotated[
        str | None, typer.Option(help="Labelled data to choose the best checkpoint by.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="What chooses the best checkpoint, such as accuracy, f1, pearson or loss. "
            "Default: the task's first; another name gets the list."
        ),
    ] = None,
    epochs: Epochs = 3,
    max_steps: MaxSteps = None,
    batch_size: BatchSize = 32,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a batch, which then has fewer texts. Default: no limit; with --chunks 16384."
        ),
    ] = None,
    accumulation: Accumulation = 1,
    global_batch_size: GlobalBatchSize = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            "--lr",
            help="Peak learning rate. Default: 5e-5 * 768 / the model's width, less beyond 1,000 steps, with --adapt "
            "10 or 100 times that.",
        ),
    ] = None,
    warmup: Warmup = 0.06,
    layer_decay: Annotated[
        float, typer.Option(help="Factor on the rate from each layer to the one below it.")
    ] = 1.0,
    weight_decay: WeightDecay = 0.01,
    freeze_layers: Annotated[
        int | None,
        typer.Option(help="Leave the embeddings and this many lower layers as they are."),
    ] = None,
    adapt: Annotated[
        str | None,
        typer.Option(
            help="Train small additions to a frozen encoder, and save them alone: lora, adapters, prefix or prompt; "
            "or features, the head alone on outputs of the encoder that are computed once."
        ),
    ] = None,
    adapt_size: Annotated[
        int | None,
        typer.Option(help="LoRA's rank, units of an adapter, or length of a prefix or prompt."),
    ] = None,
    lora_target: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Linear layer that LoRA is added to, given once for each: {', '.join(LORA_TARGETS)}. "
            f"Default: {' and '.join(Lora.targets)}."
        ),
    ] = None,
    feature_cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder of --adapt features' vectors, which runs can share. Default: features in --output."
        ),
    ] = None,
    half_features: Annotated[
        bool, typer.Option("--half-features", help="Keep them as 2-byte numbers (float16).")
    ] = False,
    parallel: Parallel = "ddp",
    precision: Precision = "fp32",
    seed: Seed = 0,
    eval_every: EvalEvery = None,
    save_every: SaveEvery = None,
    track: Track = None,
    resume: Resume = False,
    options: dict | None = None,
) -> None:
    """Fine-tune an encoder on a task.

    Examples:

    - `fastenc finetune runs/small train.tsv --dev dev.tsv -o runs/sst2`

    - `fastenc finetune runs/small mrpc.tsv --dev dev.tsv -t sentence1 -t sentence2 -o runs/mrpc --metric f1`

    - `fastenc finetune runs/small train.tsv --dev dev.tsv -o runs/sst2-lora --adapt lora --adapt-size 8`

    - `fastenc finetune runs/small train.tsv --dev dev.tsv -o runs/sst2-head --adapt features --epochs 20`

    - `fastenc finetune runs/small reviews.tsv --dev dev.tsv -o runs/reviews --max-length 512 --chunks mean --stride 64`

    - `fastenc finetune runs/small stsb.tsv --dev dev.tsv -t sentence1 -t sentence2 --label score --regression -o sts`

    - `fastenc finetune runs/small train.conll --task token-classification --crf --dev dev.conll -o runs/ner`

    - `fastenc finetune runs/small train.conll --task span-ner --inner-tag-column 3 --dev dev.conll -o runs/nested`

    - `fastenc finetune runs/small pairs.tsv --task sentence-embedding -t text -t partner --dev dev.tsv -o runs/vectors`
    """
    settings = _settings(locals())
    ways = commands.Ways(
        freeze_layers, adapt, adapt_size, lora_target or [], feature_cache, half_features
    )
    commands.finetune(task, options or {}, model, train, dev, metric, settings, ways, resume)


@app.command()
@with_task_options(predict=True)
def predict(
    model: Annotated[str, typer.Argument(help="Folder of a fine-tuned model; it tells the task.")],
    inputs: Annotated[
        str,
        typer.Argument(
            help="What to predict for: as in training, without labels, or .txt with a text a line (.gz)."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write: .tsv or .jsonl.")],
    batch_size: BatchSize = 32,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a prediction that was killed.")
    ] = False,
    options: dict | None = None,
) -> None:
    """Predict with a fine-tuned model.

    Of texts, the label and the probability of every label, or the number, a line each in their order (.tsv), or with
    the text (.jsonl). Of words, a word and its tag a line (.tsv), or each sentence with tags, entities, their offsets
    and confidences (.jsonl). Of spans, each sentence with its entities, their offsets and probabilities (.jsonl). Of
    pairs of texts, with a sentence-embedding model, their cosine similarity; `fastenc embed` gives the vectors.

    Files of any size: 10,000 items at a time are read, encoded and predicted, and what is finished is kept beside the
    output, so that `--resume` goes on from there. Questions are read as a whole.

    Examples:

    - `fastenc predict runs/sst2 new.tsv -o labels.tsv`

    - `fastenc predict runs/ner texts.txt -o entities.jsonl`
    """
    commands.predict(options or {}, model, inputs, output, batch_size, resume)


@app.command()
@with_task_options(predict=False)
def evaluate(
    model: Annotated[str, typer.Argument(help="Folder of a fine-tuned model; it tells the task.")],
    inputs: Annotated[str, typer.Argument(help="Labelled data, as in training (.gz).")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write the metrics to: .json.")
    ] = None,
    batch_size: BatchSize = 32,
    options: dict | None = None,
) -> None:
    """Measure a fine-tuned model on labelled data.

    Data are read as in training: columns, tags and lengths are those that the model was trained with, unless others are
    given. A model that transformers has trained knows none of them.

    Example:

    - `fastenc evaluate runs/sst2 test.tsv -o test.json`
    """
    commands.evaluate(options or {}, model, inputs, output, batch_size)


@app.command()
def embed(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub name.")],
    inputs: Annotated[
        str, typer.Argument(help="Texts: .txt with a text a line, .tsv, .csv or .jsonl (.gz).")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write: .safetensors or .npy.")
    ],
    column: Annotated[str, typer.Option(help="Column of the text in a table.")] = "sentence",
    pooling: Annotated[
        str | None,
        typer.Option(
            help="mean, cls, max or last-four (layers). Default: what the checkpoint declares, else mean."
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            help="Scale vectors to length 1. Default: what the checkpoint declares, else yes."
        ),
    ] = None,
    batch_size: BatchSize = 32,
) -> None:
    """Embed texts: a matrix with a row for each, in the order given.

    Example: `fastenc embed sentence-transformers/all-MiniLM-L6-v2 texts.txt -o vectors.npy`
    """
    commands.embed(model, inputs, output, column, pooling, normalize, batch_size)


@app.command()
def profile(
    model: Annotated[
        str,
        typer.Argument(
            help="minilm, bert-base, bert-large or xlm-r-base (random weights), a checkpoint folder or a hub name."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder for trace.json, profile.json, profile.png."),
    ] = Path("profile"),
    train: Annotated[
        bool, typer.Option("--train", help="A masked-LM training step instead of inference.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Sequences a batch.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of each sequence.")] = 128,
    precision: Precision = "fp32",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda. Default: a GPU if there is one.")
    ] = None,
) -> None:
    """Show where a step's time goes: for each op and kernel its time, bytes, FLOPs and share of the roofline.

    The ceilings (bandwidth of a copy, rate of a large product) are measured first, on the same device. trace.json opens
    in https://ui.perfetto.dev.

    Examples:

    - `fastenc profile minilm`

    - `fastenc profile bert-base --train --precision bf16 --batch-size 128`
    """
    measure.profile(model, output, train, batch_size, length, precision, device)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Run the repository's benchmarks (needs a checkout): `fastenc bench --help` lists them.

    Examples:

    - `fastenc bench`

    - `fastenc bench layer_norm attention`

    - `fastenc bench --tune`
    """
    measure.bench(context.args)


@app.command(name="info")
def show_info(
    numerics: Annotated[
        bool,
        typer.Option(
            "--numerics",
            help="Also measure each op's error against float64 on this device; a broken budget is an error.",
        ),
    ] = False,
) -> None:
    """What is installed, compiled and usable here, and which implementation each op takes."""
    info.show(numerics)


def _settings(values: dict) -> dict:
    """The arguments of a command that are fields of a training configuration."""
    from fastenc.train import TrainConfig

    return {
        "output_dir": str(values["output"]),
        **{name: values[name] for name in TrainConfig.__dataclass_fields__ if name in values},
        "track": tuple(values["track"] or ()),
    }
