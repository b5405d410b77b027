"""Pretraining with any objective."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fastenc._extras import require
from fastenc._options import documented, option
from fastenc.data import TokenStore, train_tokenizer
from fastenc.data.languages import ALPHA
from fastenc.data.store import HELD_OUT_ONE_IN, MANIFEST, file_checksum
from fastenc.data.tokenizer_training import KINDS
from fastenc.models import EncoderConfig, load_tokenizer, special_tokens
from fastenc.models.architectures import ARCHITECTURES, architecture_named
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
from fastenc.train.config import TrainConfig, tokens_checksum
from fastenc.train.loop import Trainer
from fastenc.train.processes import on_main_process

# Width of an attention head of a new model, where their number is not given.
HEAD_WIDTH = 32
# Families of a new model: those with a masked-LM head.
FAMILIES = tuple(name for name, kind in ARCHITECTURES.items() if kind.lm_head is not None)


@documented
@dataclass(frozen=True)
class PretrainConfig(TrainConfig):
    """Settings of a pretraining run: :class:`TrainConfig` with other defaults."""

    batch_size: int | None = option(16, "Most sequences of a micro-batch.")
    batch_tokens: int | None = option(
        None, "Most tokens of a micro-batch; replaces the batch size."
    )
    learning_rate: float | None = option(5e-4, "Peak learning rate of AdamW.", "--lr")

    def __post_init__(self) -> None:
        if self.batch_tokens is not None:
            object.__setattr__(self, "batch_size", None)
        super().__post_init__()


@documented
@dataclass(frozen=True)
class ObjectiveOptions:
    """What a model is trained to predict, and how texts become examples of it.

    Raises: ValueError for an unknown objective, or a packing that the objective does not take.
    """

    objective: str = option("mlm", f"What is predicted: {', '.join(OBJECTIVES)}.")
    packing: str | None = option(
        None, f"How texts fill sequences: {', '.join(PACKINGS)}. Default: the objective's first."
    )
    block_size: int = option(512, "Tokens of a training sequence.")
    probability: float = option(0.15, "Share of the tokens to predict.")
    replacement: str = option(
        "uniform", "How random tokens are drawn: uniform, or unigram, by their frequency."
    )
    whole_word: bool = option(False, "Mask whole words.")
    static: bool = option(False, "Mask the same tokens of a sequence in every epoch.")
    alpha: float = option(ALPHA, "Smoothing of a store's languages; 1 samples them by their size.")

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(
                f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective}"
            )
        known = self.definition.packings
        if self.packing is None:
            object.__setattr__(self, "packing", known[0])
        if self.packing not in known:
            raise ValueError(
                f"packing must be one of {', '.join(known)} for {self.objective}, got {self.packing}"
            )

    @property
    def definition(self) -> Objective:
        return OBJECTIVES[self.objective]

    def pack(self, documents: Sequence[str], tokenizer: Any) -> list[Any]:
        """The examples that documents become."""
        return PACKINGS[str(self.packing)](documents, tokenizer, self.block_size)

    def collator(
        self, tokenizer: Any, examples: Sequence[Any], seed: int, counts: Any = None
    ) -> Collator:
        """counts: of each token, for replacement="unigram"; None counts those of the examples."""
        if self.replacement == "unigram" and counts is None:
            counts = count_tokens(map(token_ids, examples), tokenizer.get_vocab_size())
        return self.definition.collator(
            tokenizer,
            examples,
            seed,
            probability=self.probability,
            replacement=self.replacement,
            unigram_counts=counts,
            whole_word=self.whole_word,
            static=self.static,
        )


@documented
@dataclass(frozen=True)
class NewModel:
    """A model with random weights, and the tokenizer that is trained for it.

    Raises: ValueError where the heads cannot share the width equally, and for a family without a masked-LM head.
    """

    tokenizer: str = option(
        "wordpiece",
        f"Kind to train ({', '.join(KINDS)}), or a folder with a tokenizer.json; not for a store.",
    )
    vocab_size: int = option(16000, "Tokens of the trained vocabulary.")
    lowercase: bool | None = option(
        None,
        "Train a vocabulary of small letters without accents. Default: for wordpiece.",
    )
    family: str | None = option(
        None, f"Architecture: {', '.join(FAMILIES)}. Default: the objective's."
    )
    layers: int = option(6, "Layers of a new model.")
    hidden: int = option(384, "Width of a new model.")
    heads: int | None = option(
        None, f"Attention heads of a new model. Default: one for every {HEAD_WIDTH} of the width."
    )
    intermediate: int | None = option(
        None, "Inner width of a new model's layers. Default: 4 times the width."
    )
    embedding_size: int | None = option(
        None, "Width of a new ELECTRA's or ALBERT's embeddings. Default: the width; 128 for ALBERT."
    )
    generator_size: float | None = option(
        None, "A new ELECTRA's generator, as a share of its width. Default: 0.25."
    )
    dropout: float = option(0.1, "Dropout of a new model, in attention too.")
    norm_eps: float = option(1e-12, "Epsilon of a new model's norms.")

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.layers < 1:
            raise ValueError(
                f"hidden and layers must be at least 1, got {self.hidden} and {self.layers}"
            )
        if self.intermediate is not None and self.intermediate < 1:
            raise ValueError(f"intermediate must be at least 1, got {self.intermediate}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps must be a finite number of at least 0, got {self.norm_eps}")
        if self.heads is not None and (self.heads < 1 or self.hidden % self.heads):
            raise ValueError(
                f"heads must divide hidden, got {self.heads} and {self.hidden}: leave heads out, or give "
                f"{self._default_heads()}"
            )
        object.__setattr__(self, "heads", self.heads or self._default_heads())
        if self.family is not None and self.family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {self.family}")

    def _default_heads(self) -> int:
        most = max(1, self.hidden // HEAD_WIDTH)
        return next(heads for heads in range(most, 0, -1) if self.hidden % heads == 0)

    def make_tokenizer(self, documents: Sequence[str]) -> Any:
        """The tokenizer of the folder given, or one trained on the documents; the same in every process."""
        if self.tokenizer not in KINDS:
            return load_tokenizer(self.tokenizer)
        # Trained once: Unigram breaks ties differently in each process.
        trained = lambda: train_tokenizer(
            documents, kind=self.tokenizer, vocab_size=self.vocab_size, lowercase=self.lowercase
        ).to_str()
        return require("tokenizers", extra="models").Tokenizer.from_str(on_main_process(trained))

    def make(self, options: ObjectiveOptions, tokenizer: Any, seed: int = 0) -> PretrainedModel:
        """A model of the objective with random weights."""
        torch.manual_seed(seed)
        positions = max(512, options.block_size)
        special = special_tokens(tokenizer)
        model = self.build(options.definition, tokenizer.get_vocab_size(), special.pad, positions)
        # Under both pairs of names: families' classes in transformers read one or the other.
        model.config.extra.update(
            cls_token_id=special.cls,
            sep_token_id=special.sep,
            bos_token_id=special.cls,
            eos_token_id=special.sep,
        )
        model.tokenizer = tokenizer
        return model

    def build(
        self, objective: Objective, vocab_size: int, pad_token_id: int, positions: int
    ) -> PretrainedModel:
        """Raises: ValueError for an option that another family's or objective's model has."""
        family = architecture_named(self.family or objective.family)
        if self.embedding_size is not None and "embedding_size" not in family.config_names:
            raise ValueError(
                f"embedding_size is of ELECTRA's and ALBERT's families, got {self.embedding_size}: leave it out"
            )
        if self.generator_size is not None and objective is not OBJECTIVES["electra"]:
            raise ValueError(
                f"generator_size is for the objective electra, got {self.generator_size}: leave it out"
            )
        new = family.new_config
        config = EncoderConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads or self._default_heads(),
            intermediate_size=self.intermediate or 4 * self.hidden,
            embedding_size=self.embedding_size or new.get("embedding_size", self.hidden),
            max_positions=positions,
            position_offset=family.padding_row(pad_token_id) + 1
            if family.positions_after_padding
            else 0,
            type_vocab_size=new.get("type_vocab_size", 2),
            activation=new.get("activation", "gelu"),
            eps=self.norm_eps,
            hidden_dropout_p=self.dropout,
            attention_dropout_p=self.dropout,
            pad_token_id=pad_token_id,
            pooler=family.has_pooler,
            family=self.family or objective.family,
        )
        options = {} if self.generator_size is None else {"generator_size": self.generator_size}
        return objective.model(config, **options)


def objective_trainer(
    options: ObjectiveOptions,
    model: PretrainedModel,
    train: Sequence[str] | TokenStore,
    config: TrainConfig,
    *,
    dev: Sequence[str] | None = None,
    settings: dict[str, Any] | None = None,
    show_progress: bool | None = None,
) -> Trainer:
    """A trainer that pretrains a model with an objective.

        tokenizer = train_tokenizer(documents)
        options = ObjectiveOptions("mlm", block_size=128)
        model = NewModel(layers=4, hidden=256).make(options, tokenizer)
        objective_trainer(options, model, documents, PretrainConfig("runs/small")).train()

    Args:
        model: of ``options.definition.model``, with its tokenizer.
        train: documents, or a store that holds their tokens.
        dev: held-out documents; None: one in twenty of ``train``, or the store's held-out examples.
        settings, show_progress: as :class:`Trainer`'s.
    Raises: ValueError where sequences are longer than the model's positions, there is no tokenizer, or nothing to
        hold out.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError("the model has no tokenizer, which text needs: set model.tokenizer")
    if options.block_size > model.config.max_positions:
        raise ValueError(
            f"block_size must be at most the model's {model.config.max_positions} positions, got {options.block_size}"
        )
    config = (
        config
        if config.learning_rate
        else replace(config, learning_rate=PretrainConfig.learning_rate)
    )
    counts, groups = None, None
    examples: Sequence[Any]
    held_out: Sequence[Any]
    if isinstance(train, TokenStore):
        store, key = train, (str(options.packing), options.block_size, config.seed)
        on_main_process(lambda: store.pack(*key))
        stored = store.examples(*key)
        examples, lengths, groups = stored, stored.lengths, stored.groups(options.alpha)
        held_out = (
            store.examples(*key, part="held_out") if dev is None else options.pack(dev, tokenizer)
        )
        if not len(held_out):
            raise ValueError(f"{store.folder} is too small to hold examples out: give dev")
        texts = f"store {file_checksum(store.folder / MANIFEST)[:12]}"
        if options.replacement == "unigram":
            counts = store.count_tokens()
    else:
        documents, held_out_documents = (train, dev) if dev is not None else hold_out(train)
        examples = options.pack(documents, tokenizer)
        held_out = options.pack(held_out_documents, tokenizer)
        lengths = [len(token_ids(example)) for example in examples]
        texts = tokens_checksum(map(token_ids, examples))
        if options.replacement == "unigram":
            counts = count_tokens(map(token_ids, examples), tokenizer.get_vocab_size())
    held_out_collator = options.collator(tokenizer, held_out, config.seed + 1, counts)
    return Trainer(
        model,
        config,
        examples,
        lengths,
        options.collator(tokenizer, examples, config.seed, counts),
        groups=groups,
        evaluate=lambda m: evaluate_objective(m, held_out, held_out_collator),
        settings={
            **asdict(options),
            **(settings or {}),
            "train texts": texts,
            "held_out": len(held_out),
            "held-out texts": tokens_checksum(map(token_ids, held_out)),
        },
        summary=[
            f"{len(examples):,} sequences of {int(torch.as_tensor(lengths).sum()):,} tokens in all to train on, "
            f"{len(held_out):,} held out; a vocabulary of {tokenizer.get_vocab_size():,}"
        ],
        show_progress=show_progress,
    )


def hold_out(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """The documents to train on, and one in twenty that is held out.

    Raises: ValueError for a single document.
    """
    kept = [d for index, d in enumerate(documents) if index % HELD_OUT_ONE_IN]
    if not kept:
        raise ValueError(
            "one document cannot be both trained on and held out: give dev, or more documents"
        )
    return kept, list(documents[::HELD_OUT_ONE_IN])
