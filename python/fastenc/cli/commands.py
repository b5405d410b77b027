"""What the commands do."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastenc._extras import require
from fastenc._files import write_atomically
from fastenc.adapt import add_adaptation, freeze_encoder, trained_parameters
from fastenc.cli.options import make_task
from fastenc.data import TokenStore, is_store, read_inputs, read_texts, train_tokenizer
from fastenc.data.store import HELD_OUT_ONE_IN, MANIFEST, file_checksum
from fastenc.data.tokenizer_training import KINDS
from fastenc.models import (
    Encoder,
    EncoderConfig,
    MaskedLM,
    checkpoint,
    load_tokenizer,
    special_tokens,
)
from fastenc.models.adaptations import METHODS, Lora
from fastenc.models.families import family_named
from fastenc.models.pretrained import PretrainedModel
from fastenc.objectives import (
    OBJECTIVES,
    PACKINGS,
    Collator,
    Objective,
    count_tokens,
    evaluate_objective,
    token_ids,
)
from fastenc.tasks import Task, predict_file, task_named, task_of
from fastenc.train import TrainConfig, Trainer, fine_tuning_rate, task_trainer
from fastenc.train.checkpoint import check_free
from fastenc.train.config import tokens_checksum
from fastenc.train.fitting import Fitting
from fastenc.train.processes import on_main_process, process_state
from fastenc.train.recipe import write_recipe


class NewModel(NamedTuple):
    """A model to be made."""

    tokenizer: str
    vocab_size: int
    lowercase: bool | None
    family: str | None
    layers: int
    hidden: int
    heads: int
    intermediate: int | None
    embedding_size: int | None
    generator_size: float | None
    dropout: float
    norm_eps: float

    def build(
        self, objective: Objective, vocab_size: int, pad_token_id: int, positions: int
    ) -> PretrainedModel:
        """With first weights. Raises: ValueError for an option that another family's or objective's model has."""
        family = family_named(self.family or objective.family)
        if self.embedding_size is not None and "embedding_size" not in family.config_names:
            raise ValueError(
                f"--embedding-size is of ELECTRA's family, got {self.embedding_size}: leave it out"
            )
        if self.generator_size is not None and objective is not OBJECTIVES["electra"]:
            raise ValueError(
                f"--generator-size is for --objective electra, got {self.generator_size}: leave it out"
            )
        config = EncoderConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            intermediate_size=self.intermediate or 4 * self.hidden,
            embedding_size=self.embedding_size or self.hidden,
            max_positions=positions,
            position_offset=pad_token_id + 1 if family.positions_after_padding else 0,
            type_vocab_size=family.type_vocab_size,
            eps=self.norm_eps,
            hidden_dropout_p=self.dropout,
            attention_dropout_p=self.dropout,
            pad_token_id=pad_token_id,
            pooler=family.has_pooler,
            family=self.family or objective.family,
        )
        options = {} if self.generator_size is None else {"generator_size": self.generator_size}
        return objective.model(config, **options)


class Examples(NamedTuple):
    """What is to be predicted, and how text becomes examples of it."""

    objective: str
    teacher: str | None
    packing: str | None
    block_size: int
    probability: float
    replacement: str
    whole_word: bool
    static: bool
    alpha: float


def pretrain(
    train: list[str],
    dev: str | None,
    column: str | None,
    start: str | None,
    new: NewModel,
    wanted: Examples,
    settings: dict[str, Any],
    recipe: dict[str, Any],
    resume: bool,
) -> None:
    if settings["batch_tokens"] is not None:  # which counts instead
        settings = {**settings, "batch_size": None}
    config = TrainConfig(**settings)
    if wanted.objective not in OBJECTIVES:
        raise ValueError(
            f"--objective must be one of {', '.join(OBJECTIVES)}, got {wanted.objective}"
        )
    objective = OBJECTIVES[wanted.objective]
    packing = wanted.packing or objective.packings[0]
    if packing not in objective.packings:
        raise ValueError(
            f"--packing must be one of {', '.join(objective.packings)} for {wanted.objective}, got {packing}"
        )
    if (wanted.teacher is None) != (objective.student is None):
        raise ValueError(
            f"--teacher is for --objective distill, which needs it, got {wanted.teacher} for {wanted.objective}"
        )
    found = check_free(Path(config.output_dir), resume)
    store = _store(train)
    documents, held_out = ([], None) if store else _split(train, dev, column)
    # A run that goes on has its tokenizer in its checkpoint.
    folder = found or start
    teacher: dict[str, Any] = {}
    if wanted.teacher is not None:
        teacher["teacher"] = MaskedLM.from_pretrained(wanted.teacher)
    if folder:
        model = _with_tokenizer(objective.model.from_pretrained(folder, **teacher), folder)
    elif objective.student is not None:
        student = objective.student(teacher["teacher"], new.layers)
        model = _with_tokenizer(student, wanted.teacher)
    else:
        tokenizer = store.tokenizer() if store else _tokenizer(new, documents)
        model = _new_model(objective, new, tokenizer, wanted, config.seed)
    if wanted.block_size > model.config.max_positions:
        raise ValueError(
            f"--block-size must be at most the model's {model.config.max_positions} positions, got {wanted.block_size}"
        )
    if store:
        store.check_tokenizer(model.tokenizer, str(folder or wanted.teacher or "the model"))
    pack = lambda texts: PACKINGS[packing](texts, model.tokenizer, wanted.block_size)
    examples: Sequence[Any]
    held_out_examples: Sequence[Any]
    if store:
        key = packing, wanted.block_size, config.seed
        on_main_process(lambda: store.pack(*key))
        stored = store.examples(*key)
        examples, held_out_examples = stored, store.examples(*key, part="held_out")
        if dev is not None:
            held_out_examples = pack(_not_empty([dev], column))
        if not len(held_out_examples):
            raise ValueError(f"{store.folder} is too small to hold examples out: give --dev")
        lengths: Any = stored.lengths
        groups = stored.groups(wanted.alpha)
        texts = f"store {file_checksum(store.folder / MANIFEST)[:12]}"
    else:
        examples, held_out_examples = pack(documents), pack(held_out)
        lengths, groups = [len(token_ids(example)) for example in examples], None
        texts = tokens_checksum(map(token_ids, examples))
    counts = None
    if wanted.replacement == "unigram":
        size = model.tokenizer.get_vocab_size()
        counts = store.count_tokens() if store else count_tokens(map(token_ids, examples), size)

    def collator(chosen: Sequence[Any], seed: int) -> Collator:
        return objective.collator(
            model.tokenizer,
            chosen,
            seed,
            probability=wanted.probability,
            replacement=wanted.replacement,
            unigram_counts=counts,
            whole_word=wanted.whole_word,
            static=wanted.static,
        )

    held_out_collator = collator(held_out_examples, config.seed + 1)
    trainer = Trainer(
        model,
        config,
        examples,
        lengths,
        collator(examples, config.seed),
        groups=groups,
        evaluate=lambda m: evaluate_objective(m, held_out_examples, held_out_collator),
        settings={
            **wanted._asdict(),
            "packing": packing,
            **({} if start else new._asdict()),
            "train texts": texts,
            "held_out": len(held_out_examples),
            "held-out texts": tokens_checksum(map(token_ids, held_out_examples)),
        },
    )
    if trainer.accelerator.is_main_process and found is None:
        write_recipe(
            trainer.output_dir / "recipe.toml",
            {**recipe, "packing": packing},
            f"fastenc pretrain {' '.join(train)}",
        )
    _run(trainer, resume)


class Ways(NamedTuple):
    """What of the model ``finetune`` trains."""

    freeze_layers: int | None
    adapt: str | None
    adapt_size: int | None
    lora_targets: Sequence[str] = ()
    feature_cache: Path | None = None
    half_features: bool = False

    def adaptation(self) -> Any:
        """Raises: ValueError for an unknown name, or a size that is not positive or has nothing to belong to."""
        if self.adapt != "features" and (self.feature_cache or self.half_features):
            raise ValueError(
                f"--feature-cache and --half-features need --adapt features, got {self.adapt}"
            )
        if self.adapt != "lora" and self.lora_targets:
            raise ValueError(f"--lora-target needs --adapt lora, got {self.adapt}")
        if self.adapt is None:
            if self.adapt_size is not None:
                raise ValueError(
                    f"--adapt-size needs --adapt {'|'.join(METHODS)}, got {self.adapt_size}"
                )
            return None
        if self.adapt not in (*METHODS, "features"):
            raise ValueError(
                f"--adapt must be one of {', '.join(METHODS)}, features, got {self.adapt}"
            )
        if self.freeze_layers is not None:
            raise ValueError("--adapt freezes the whole encoder: leave out --freeze-layers")
        if self.adapt == "features":
            if self.adapt_size is not None:
                raise ValueError(
                    f"--adapt features adds nothing, got --adapt-size {self.adapt_size}"
                )
            return None
        if self.adapt == "lora":
            rank = Lora.rank if self.adapt_size is None else self.adapt_size
            targets = tuple(self.lora_targets) or Lora.targets
            # The usual scale, whatever the rank.
            return Lora(rank, alpha=2.0 * rank, targets=targets)
        method = METHODS[self.adapt]
        return method() if self.adapt_size is None else method(self.adapt_size)

    def check_start(self, task: Task, model_name: str) -> None:
        """Raises: ValueError for a task without a head to train alone, or a model that is adapted already."""
        if self.adapt == "features" and task.model_class.architecture == "Model":
            raise ValueError(
                f"--adapt features trains a head on a frozen encoder's outputs, and {task.name} has none: give "
                f"--adapt {'|'.join(METHODS)}, or leave it out"
            )
        if self.adapt not in METHODS:
            return
        folder = checkpoint.resolve(model_name)
        if (folder / checkpoint.ADAPTER_CONFIG).exists():
            raise ValueError(
                f"{model_name} holds an adaptation already, got --adapt {self.adapt}: leave it out to train that one "
                f"further, or give {checkpoint.without_head(folder)}"
            )


def finetune(
    task_name: str,
    options: dict[str, Any],
    model_name: str,
    train_path: str,
    dev_path: str | None,
    metric: str | None,
    settings: dict[str, Any],
    ways: Ways,
    resume: bool,
) -> None:
    task = make_task(task_named(task_name), options)
    adaptation = ways.adaptation()
    rate_given = settings["learning_rate"] is not None
    config = TrainConfig(
        **{k: v for k, v in settings.items() if k != "learning_rate" or rate_given}
    )
    check_free(Path(config.output_dir), resume)
    ways.check_start(task, model_name)
    train = task.read(train_path)
    dev = None if dev_path is None else task.read(dev_path, train)
    torch.manual_seed(config.seed)
    model = task.load(model_name, train)
    if not rate_given:
        steps = config.steps_over(len(train), process_state().num_processes)
        rate = fine_tuning_rate(model.config.hidden_size, ways.adapt, steps)
        config = replace(config, learning_rate=rate)
    if ways.freeze_layers is not None:
        freeze_encoder(model, ways.freeze_layers)
    if adaptation is not None:
        add_adaptation(model, adaptation)
    features = None
    if ways.adapt == "features":
        freeze_encoder(model)
        features = ways.feature_cache or Path(config.output_dir) / "features"
    trained, everything = trained_parameters(model)
    trainer = task_trainer(
        task,
        model,
        train,
        config,
        dev=dev,
        metric=metric,
        features=features,
        features_dtype=torch.float16 if ways.half_features else torch.float32,
    )
    print(f"training {trained:,} of {everything:,} parameters")
    _run(trainer, resume)


def predict(
    options: dict[str, Any],
    model_name: str,
    inputs: str,
    output: Path,
    batch_size: int,
    resume: bool,
) -> None:
    task = _task_of_model(model_name, options)
    _check_suffix(output, task.outputs)
    model = task.load(model_name).to(_device())
    number = predict_file(
        task, model, inputs, output, batch_size, resume=resume, model_name=model_name
    )
    print(f"{number} predictions in {output}")


def evaluate(
    options: dict[str, Any],
    model_name: str,
    inputs: str,
    output: Path | None,
    batch_size: int,
) -> None:
    if output is not None:
        _check_suffix(output, (".json",))
    task = _task_of_model(model_name, options)
    model = task.load(model_name).to(_device())
    data = task.read(inputs, model)
    metrics = task.evaluate(model, data, task.encode(data, model), batch_size, show_progress=None)
    if output is not None:
        text = json.dumps(metrics, indent=1)
        _write(output, lambda path: path.write_text(text))
    print("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


def embed(
    model_name: str,
    inputs: str,
    output: Path,
    column: str,
    pooling: str | None,
    normalize: bool | None,
    batch_size: int,
) -> None:
    _check_suffix(output, (".safetensors", ".npy"))
    texts = read_inputs(inputs, [column])
    model = Encoder.from_pretrained(model_name).to(_device())
    vectors = model.encode(texts, batch_size=batch_size, pooling=pooling, normalize=normalize).to(
        "cpu", copy=True
    )
    if output.suffix == ".npy":
        numpy = require("numpy", extra="train")

        def save(path: Path) -> None:
            with open(path, "wb") as file:
                numpy.save(file, vectors.numpy())

    else:
        save_file = require("safetensors.torch", extra="models").save_file
        save = lambda path: save_file({"embeddings": vectors}, path)
    _write(output, save)
    print(f"{vectors.shape[0]} vectors of {vectors.shape[1]} numbers in {output}")


def check_tokenizer_options(train: list[str], given: list[str]) -> None:
    """Raises: ValueError when a tokenizer is chosen on the command line for a store, which has its own."""
    chosen = [option for option in ("tokenizer", "vocab-size", "lowercase") if option in given]
    if chosen and any(map(is_store, train)):
        raise ValueError(
            f"a store's tokens have the tokenizer that it was prepared with, got --{chosen[0]}: leave it out, or "
            "prepare the texts with another"
        )


def _store(train: list[str]) -> TokenStore | None:
    """The store that is to be trained on, or None where texts are given."""
    if not any(map(is_store, train)):
        return None
    if len(train) > 1:
        raise ValueError(f"a token store is trained on alone, got {' '.join(train)}")
    return TokenStore(train[0])


def _split(train: list[str], dev: str | None, column: str | None) -> tuple[list[str], list[str]]:
    """The documents to train on, and those held out."""
    documents = _not_empty(train, column)
    if dev is not None:
        return documents, _not_empty([dev], column)
    held_out = documents[::HELD_OUT_ONE_IN]
    documents = [d for place, d in enumerate(documents) if place % HELD_OUT_ONE_IN]
    if not documents:
        raise ValueError(
            "one document cannot be both trained on and held out: give --dev, or more documents"
        )
    return documents, held_out


def _not_empty(paths: list[str], column: str | None) -> list[str]:
    """The documents that hold text; says how many do not."""
    read = [document for path in paths for document in read_texts(path, column)]
    documents = [document for document in read if document.strip()]
    if not documents:
        raise ValueError(
            f"{' '.join(paths)}: every one of {len(read):,} documents is empty, give some with text"
        )
    if len(documents) < len(read) and process_state().is_main_process:
        print(f"{len(read) - len(documents):,} of {len(read):,} documents were empty")
    return documents


def _tokenizer(new: NewModel, documents: list[str]) -> Any:
    if new.tokenizer not in KINDS:
        return load_tokenizer(new.tokenizer)
    # Learnt once: Unigram's ties fall differently in each process.
    learn = lambda: train_tokenizer(
        documents, kind=new.tokenizer, vocab_size=new.vocab_size, lowercase=new.lowercase
    ).to_str()
    library = require("tokenizers", extra="models")
    return library.Tokenizer.from_str(on_main_process(learn))


def _new_model(
    objective: Objective, new: NewModel, tokenizer: Any, wanted: Examples, seed: int
) -> PretrainedModel:
    torch.manual_seed(seed)
    positions = max(512, wanted.block_size)
    model = new.build(
        objective, tokenizer.get_vocab_size(), special_tokens(tokenizer).pad, positions
    )
    model.tokenizer = tokenizer
    return model


def _with_tokenizer(model: Any, name: str | Path | None) -> Any:
    """``model`` itself; Raises: ValueError when it came without a tokenizer."""
    if model.tokenizer is None:
        raise ValueError(f"{name} has no tokenizer.json, which text needs")
    return model


def _task_of_model(model_name: str, options: dict[str, Any]) -> Task:
    """A fine-tuned model's task, with the options of its training where none are given."""
    kind = task_of(model_name)
    kept = kind.options_kept(checkpoint.read_config(checkpoint.resolve(model_name)))
    return make_task(kind, {**kept, **options})


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_suffix(output: Path, allowed: tuple[str, ...]) -> None:
    if output.suffix not in allowed:
        raise ValueError(f"--output must end in {' or '.join(allowed)}, got {output}")


def _write(output: Path, write) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, write)


def _run(trainer: Trainer | Fitting, resume: bool) -> None:
    metrics = trainer.train(resume=resume)
    if trainer.accelerator.is_main_process:
        if metrics:
            print("best:", "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        print(f"model, metrics.json, log.jsonl and curves.png in {trainer.output_dir}")
