"""What the commands do."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastenc._extras import require
from fastenc._files import write_atomically
from fastenc.data import (
    LabelledData,
    collate_classification,
    encode_labelled,
    encode_texts,
    full_sentence_blocks,
    load_tokenizer,
    read_labelled,
    read_table,
    read_texts,
    special_tokens,
    train_tokenizer,
)
from fastenc.data.tokenizers import KINDS
from fastenc.models import Encoder, EncoderConfig, MaskedLM, SequenceClassifier
from fastenc.objectives import MlmCollator, count_tokens
from fastenc.tasks import evaluate_classifier, evaluate_masked_lm, predict_logits
from fastenc.train import TrainConfig, Trainer, fine_tuning_rate
from fastenc.train.checkpoint import check_free
from fastenc.train.processes import on_main_process

HELD_OUT_ONE_IN = 20
CLASSIFICATION_METRICS = ("accuracy", "f1", "mcc", "loss")  # the first is the default
REGRESSION_METRICS = ("pearson", "spearman", "loss")


class NewModel(NamedTuple):
    """A model to be made."""

    tokenizer: str
    vocab_size: int
    layers: int
    hidden: int
    heads: int


class Masking(NamedTuple):
    """How text becomes masked-LM examples."""

    block_size: int
    probability: float
    replacement: str
    whole_word: bool


class Labelled(NamedTuple):
    """Where labelled texts are."""

    train: str
    dev: str | None
    text: list[str]
    label: str
    regression: bool
    max_length: int


def pretrain(
    train: list[str],
    dev: str | None,
    column: str | None,
    start: str | None,
    new: NewModel,
    masking: Masking,
    settings: dict[str, Any],
    resume: bool,
) -> None:
    config = TrainConfig(**settings)
    found = check_free(Path(config.output_dir), resume)
    documents = [document for path in train for document in read_texts(path, column)]
    if dev is not None:
        held_out = read_texts(dev, column)
    else:
        held_out = documents[::HELD_OUT_ONE_IN]
        documents = [d for place, d in enumerate(documents) if place % HELD_OUT_ONE_IN]
    if not documents:
        raise ValueError(
            "one document cannot be both trained on and held out: give --dev, or more documents"
        )
    # A run that goes on has its tokenizer in its checkpoint.
    folder = found or start
    model = (
        _with_tokenizer(MaskedLM.from_pretrained(folder), folder)
        if folder
        else _new_masked_lm(new, documents, masking, config.seed)
    )
    if masking.block_size > model.config.max_positions:
        raise ValueError(
            f"--block-size must be at most the model's {model.config.max_positions} positions, got {masking.block_size}"
        )
    blocks = full_sentence_blocks(documents, model.tokenizer, masking.block_size)
    held_out_blocks = full_sentence_blocks(held_out, model.tokenizer, masking.block_size)
    counts = None
    if masking.replacement == "unigram":
        counts = count_tokens(blocks, model.tokenizer.get_vocab_size())

    def collator(seed: int) -> MlmCollator:
        return MlmCollator(
            model.tokenizer,
            probability=masking.probability,
            replacement=masking.replacement,
            unigram_counts=counts,
            whole_word=masking.whole_word,
            seed=seed,
        )

    held_out_collator = collator(config.seed + 1)
    trainer = Trainer(
        model,
        config,
        blocks,
        [len(block) for block in blocks],
        collator(config.seed),
        evaluate=lambda m: evaluate_masked_lm(m, held_out_blocks, held_out_collator),
        settings={
            **masking._asdict(),
            **({} if start else new._asdict()),
            "held_out": len(held_out_blocks),
        },
    )
    _run(trainer, resume)


def finetune(
    model_name: str, data: Labelled, metric: str | None, settings: dict[str, Any], resume: bool
) -> None:
    rate_given = settings["learning_rate"] is not None
    config = TrainConfig(
        **{k: v for k, v in settings.items() if k != "learning_rate" or rate_given}
    )
    known = REGRESSION_METRICS if data.regression else CLASSIFICATION_METRICS
    if metric is not None and (data.dev is None or metric not in known):
        raise ValueError(f"--metric needs --dev and one of {', '.join(known)}, got {metric}")
    check_free(Path(config.output_dir), resume)
    train = read_labelled(data.train, data.text, data.label, regression=data.regression)
    dev: LabelledData | None = None
    if data.dev is not None:
        dev = read_labelled(
            data.dev, data.text, data.label, train.label_names, regression=data.regression
        )
    torch.manual_seed(config.seed)
    options: dict[str, Any] = (
        {"num_labels": 1, "problem_type": "regression"}
        if data.regression
        else {"label_names": train.label_names, "problem_type": "single_label_classification"}
    )
    model = _with_tokenizer(SequenceClassifier.from_pretrained(model_name, **options), model_name)
    if not rate_given:
        config = replace(config, learning_rate=fine_tuning_rate(model.config.hidden_size))
    max_length = min(data.max_length, model.config.max_positions)
    examples = encode_labelled(train, model.tokenizer, max_length)
    dev_examples = encode_labelled(dev, model.tokenizer, max_length) if dev else []
    metric = metric or known[0]
    trainer = Trainer(
        model,
        config,
        examples,
        [len(example.input_ids) for example in examples],
        lambda chosen, step: collate_classification(chosen),
        evaluate=(lambda m: evaluate_classifier(m, dev_examples, config.batch_size))
        if dev
        else None,
        metric=metric,
        higher_is_better=metric != "loss",
        settings={"label_names": train.label_names, "held_out": len(dev_examples)},
    )
    _run(trainer, resume)


def predict(
    model_name: str, inputs: str, output: Path, text: list[str], max_length: int, batch_size: int
) -> None:
    _check_suffix(output, (".tsv", ".jsonl"))
    texts = _texts(inputs, text)
    model = _with_tokenizer(SequenceClassifier.from_pretrained(model_name), model_name)
    examples = encode_texts(texts, model.tokenizer, min(max_length, model.config.max_positions))
    logits = predict_logits(model, examples, batch_size, show_progress=None)
    if model.problem_type == "regression":
        rows = [{"prediction": value} for value in logits[:, 0].tolist()]
    else:
        rows = [
            {"label": model.label_names[max(range(len(p)), key=p.__getitem__)]}
            | dict(zip((f"p({name})" for name in model.label_names), p, strict=True))
            for p in logits.softmax(1).tolist()
        ]
    if output.suffix == ".jsonl":
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    else:
        cell = lambda value: f"{value:.6f}" if isinstance(value, float) else value
        lines = ["\t".join(rows[0])] + ["\t".join(cell(v) for v in row.values()) for row in rows]
    _write(output, lambda path: path.write_text("\n".join(lines) + "\n", encoding="utf-8"))
    print(f"{len(rows)} predictions in {output}")


def embed(
    model_name: str,
    inputs: str,
    output: Path,
    column: str,
    pooling: str,
    normalize: bool,
    batch_size: int,
) -> None:
    _check_suffix(output, (".safetensors", ".npy"))
    texts = _texts(inputs, [column])
    model = Encoder.from_pretrained(model_name)
    vectors = model.encode(
        texts, batch_size=batch_size, pooling=pooling, normalize=normalize
    ).clone()
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


def _new_masked_lm(new: NewModel, documents: list[str], masking: Masking, seed: int) -> MaskedLM:
    if new.tokenizer in KINDS:
        # Learnt once: ties between equally frequent tokens fall differently in each process.
        learn = lambda: train_tokenizer(
            documents, kind=new.tokenizer, vocab_size=new.vocab_size
        ).to_str()
        library = require("tokenizers", extra="models")
        tokenizer = library.Tokenizer.from_str(on_main_process(learn))
    else:
        tokenizer = load_tokenizer(new.tokenizer)
    config = EncoderConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=new.hidden,
        num_layers=new.layers,
        num_heads=new.heads,
        intermediate_size=4 * new.hidden,
        max_positions=max(512, masking.block_size),
        pad_token_id=special_tokens(tokenizer).pad,
    )
    torch.manual_seed(seed)
    model = MaskedLM(config)
    model.tokenizer = tokenizer
    return model


def _with_tokenizer(model: Any, name: str | Path) -> Any:
    """``model`` itself; Raises: ValueError when it came without a tokenizer."""
    if model.tokenizer is None:
        raise ValueError(f"{name} has no tokenizer.json, which text needs")
    return model


def _texts(inputs: str, columns: list[str]) -> list[Any]:
    """Texts of a table's columns, or the lines of a text file: empty ones too, so that outputs stay beside them."""
    path = Path(inputs)
    if path.name.endswith((".txt", ".txt.gz")):
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            try:
                return [line.rstrip("\n") for line in file]
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not UTF-8 ({error}): convert the file") from error
    rows = read_table(inputs, columns)
    parts = [tuple(str(row[name]) for name in columns) for row in rows]
    return [p[0] if len(p) == 1 else p for p in parts]


def _check_suffix(output: Path, allowed: tuple[str, ...]) -> None:
    if output.suffix not in allowed:
        raise ValueError(f"--output must end in {' or '.join(allowed)}, got {output}")


def _write(output: Path, write) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, write)


def _run(trainer: Trainer, resume: bool) -> None:
    metrics = trainer.train(resume=resume)
    if trainer.accelerator.is_main_process:
        if metrics:
            print("best:", "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        print(f"model, metrics.json, log.jsonl and curves.png in {trainer.output_dir}")
