"""The trainer of pretraining, for any objective."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastenc._base.options import documented, option
from fastenc.data import Group, TokenStore
from fastenc.data.store import HELD_OUT_ONE_IN, MANIFEST, file_checksum
from fastenc.models import Seq2Seq
from fastenc.models.pretrained import PretrainedModel
from fastenc.objectives import count_tokens, evaluate_objective, token_ids
from fastenc.objectives.evaluation import check_held_out
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.train.config import TrainConfig, tokens_checksum
from fastenc.train.loop import Trainer
from fastenc.train.model_card import Origin
from fastenc.train.objective_options import ObjectiveOptions
from fastenc.train.processes import on_main_process


@documented
@dataclass(frozen=True)
class PretrainConfig(TrainConfig):
    """Settings of a pretraining run: :class:`TrainConfig` with other defaults."""

    batch_size: int | None = option(16, "Largest number of sequences in a micro-batch.")
    batch_tokens: int | None = option(
        None, "Largest number of tokens in a micro-batch, instead of the batch size."
    )
    learning_rate: float | None = option(5e-4, "Peak learning rate of AdamW.", "--lr")

    def __post_init__(self) -> None:
        if self.batch_tokens is not None:
            object.__setattr__(self, "batch_size", None)
        super().__post_init__()


def objective_trainer(
    options: ObjectiveOptions,
    model: PretrainedModel,
    train: Sequence[str] | TokenStore,
    config: TrainConfig,
    *,
    dev: Sequence[str] | None = None,
    settings: Mapping[str, object] | None = None,
    origin: Origin | None = None,
    show_progress: bool | None = None,
) -> Trainer:
    """A trainer that pretrains a model with an objective.

        tokenizer = train_tokenizer(documents)
        options = ObjectiveOptions("mlm", block_size=128)
        model = NewModel(layers=4, hidden=256).make(options, tokenizer)
        objective_trainer(options, model, documents, PretrainConfig("runs/small")).train()

    Args:
        options: the objective and its options.
        model: an ``options.definition.model`` with its tokenizer.
        train: documents, or a store with their tokens.
        config: settings of the training; if it has no learning rate, that of :class:`PretrainConfig` is used.
        dev: held-out documents; None: one in twenty documents of ``train``, or the store's held-out examples.
        settings, origin, show_progress: as in :class:`Trainer`.
    Warns: UserWarning if the checkpoint that the model was loaded from lacks weights of the objective's head.
    Raises: ValueError if ``block_size`` is above the model's number of positions, if the model has no tokenizer, or if
        there are too few data to hold some out.
    """
    tokenizer = _check_model(options, model)
    if not config.learning_rate:
        config = replace(config, learning_rate=PretrainConfig.learning_rate)
    start_id = model.decoder_start_token_id if isinstance(model, Seq2Seq) else None
    if options.definition.has_decoder:
        # A tokenizer without the tokens that the objective needs is refused before the texts are packed.
        options.collator(tokenizer, [], config.seed, start_id=start_id)
    data = _read(options, tokenizer, train, dev, config.seed)
    examples, held_out, counts = data.examples, data.held_out, data.counts
    collator = options.collator(tokenizer, examples, config.seed, counts, start_id)
    try:
        held_out_collator = options.collator(tokenizer, held_out, config.seed + 1, counts, start_id)
    except ValueError as error:
        # The collator has accepted the training texts.
        raise ValueError(
            f"too few held-out texts: {error}. Give more texts, or give dev= other texts to hold out; without them one "
            "document in twenty is held out"
        ) from error
    check_held_out(held_out, held_out_collator)
    return Trainer(
        model,
        config,
        examples,
        data.lengths,
        collator,
        groups=data.groups,
        evaluate=lambda m: evaluate_objective(m, held_out, held_out_collator),
        settings={
            **asdict(options),
            **(settings or {}),
            "train texts": data.checksum,
            "held_out": len(held_out),
            "held-out texts": tokens_checksum(map(token_ids, held_out)),
        },
        summary=[
            f"{len(examples):,} training sequences with {int(torch.as_tensor(data.lengths).sum()):,} tokens in all, "
            f"{len(held_out):,} sequences held out; vocabulary of {tokenizer.get_vocab_size():,} tokens"
        ],
        origin=origin,
        held_out=len(held_out),
        show_progress=show_progress,
    )


def _check_model(options: ObjectiveOptions, model: PretrainedModel) -> TokenizerLike:
    """Refuse a model that the objective cannot train, and warn if it lacks weights of the objective's head.

    Returns: the model's tokenizer.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError("the model must have a tokenizer, got none: set model.tokenizer")
    if not isinstance(model, options.definition.model):
        raise ValueError(
            f"{options.objective} trains a {options.definition.model.__name__}, got a {type(model).__name__}: load the "
            f"checkpoint with {options.definition.model.__name__}, or choose another objective"
        )
    if options.block_size > model.config.max_positions:
        raise ValueError(
            f"block_size must be at most {model.config.max_positions}, the model's number of positions, got "
            f"{options.block_size}: give less"
        )
    if model.first_weights:
        first, *others = sorted(model.first_weights)
        warnings.warn(
            f"{model.base} lacks {first}{f' and {len(others)} more weights' if others else ''} of the objective "
            f"{options.objective}: their training begins with random values",
            stacklevel=3,
        )
    return tokenizer


class _Data(NamedTuple):
    """The training and held-out examples of a run.

    Fields:
        lengths: number of tokens of each training example.
        checksum: of the training texts.
        counts: occurrences of each token, if the objective's options need them.
        groups: the store's languages.
    """

    examples: Sequence[Any]
    lengths: Sequence[int] | Tensor
    held_out: Sequence[Any]
    checksum: str
    counts: Tensor | None = None
    groups: Sequence[Group] | None = None


def _read(
    options: ObjectiveOptions,
    tokenizer: TokenizerLike,
    train: Sequence[str] | TokenStore,
    dev: Sequence[str] | None,
    seed: int,
) -> _Data:
    if isinstance(train, TokenStore):
        return _read_store(options, tokenizer, train, dev, seed)
    documents, held_out = (train, dev) if dev is not None else hold_out(train)
    examples = options.pack(documents, tokenizer)
    counts = None
    if options.replacement == "unigram":
        counts = count_tokens(map(token_ids, examples), tokenizer.get_vocab_size())
    return _Data(
        examples,
        [len(token_ids(example)) for example in examples],
        options.pack(held_out, tokenizer),
        tokens_checksum(map(token_ids, examples)),
        counts,
    )


def _read_store(
    options: ObjectiveOptions,
    tokenizer: TokenizerLike,
    store: TokenStore,
    dev: Sequence[str] | None,
    seed: int,
) -> _Data:
    key = str(options.packing), options.text_size(tokenizer), seed
    on_main_process(lambda: store.pack(*key))
    examples = store.examples(*key)
    held_out: Sequence[Any] = (
        store.examples(*key, subset="held_out") if dev is None else options.pack(dev, tokenizer)
    )
    if not len(held_out):
        raise ValueError(
            f"{store.folder} must have enough examples to hold some out, got {len(examples)}: give dev= other texts"
        )
    return _Data(
        examples,
        examples.lengths,
        held_out,
        f"store {file_checksum(store.folder / MANIFEST)[:12]}",
        store.count_tokens() if options.replacement == "unigram" else None,
        examples.groups(options.alpha),
    )


def hold_out(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """(documents to train on, held-out documents). One document in twenty is held out.

    Raises: ValueError for a single document.
    """
    kept = [d for index, d in enumerate(documents) if index % HELD_OUT_ONE_IN]
    if not kept:
        raise ValueError(
            "there must be at least two documents, because one in twenty is held out for the evaluation, got "
            f"{len(documents)}: give more documents, or give dev= other texts"
        )
    return kept, list(documents[::HELD_OUT_ONE_IN])
