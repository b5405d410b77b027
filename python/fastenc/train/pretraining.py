"""The trainer of pretraining, for any objective."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from typing import Any

import torch

from fastenc._base.extras import require
from fastenc._base.options import documented, option
from fastenc.data import TokenStore, train_tokenizer
from fastenc.data.blocks import check_block_size
from fastenc.data.languages import ALPHA
from fastenc.data.store import HELD_OUT_ONE_IN, MANIFEST, file_checksum
from fastenc.data.tokenizer_training import MODEL_TYPES
from fastenc.models import EncoderConfig, Seq2Seq
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
from fastenc.objectives.electra import DISENTANGLED, SHARED
from fastenc.objectives.evaluation import check_held_out
from fastenc.text import load_tokenizer, special_tokens
from fastenc.text.tokenizers import TokenizerLike
from fastenc.train.config import TrainConfig, tokens_checksum
from fastenc.train.loop import Trainer
from fastenc.train.model_card import Origin
from fastenc.train.processes import on_main_process

# Width of an attention head of a new model if the number of heads is not given.
HEAD_WIDTH = 32


def families_of(objective: Objective) -> tuple[str, ...]:
    """The families that a new model can have: those with a decoder, or with a masked-LM head."""
    fits = lambda each: each.has_decoder if objective.has_decoder else each.lm_head is not None
    return tuple(name for name, architecture in ARCHITECTURES.items() if fits(architecture))


FAMILIES = tuple(dict.fromkeys(chain.from_iterable(map(families_of, OBJECTIVES.values()))))


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


@documented
@dataclass(frozen=True)
class ObjectiveOptions:
    """What a model is trained to predict, and how texts become training examples.

    Raises: ValueError for an unknown objective, and for a packing or another option that the objective does not take.
    """

    objective: str = option("mlm", f"What the model learns to predict: {', '.join(OBJECTIVES)}.")
    packing: str | None = option(
        None,
        f"How texts are packed into sequences: {', '.join(PACKINGS)}. Default: segment-pairs for mlm+nsp and mlm+sop, "
        "doc-sentences for denoise, else full-sentences.",
    )
    block_size: int = option(
        512,
        "Largest number of tokens in a training sequence; of an encoder-decoder, on either side.",
    )
    probability: float = option(
        0.15, "Share of the tokens to predict. Not for ul2, and not for denoise."
    )
    mean_span: float = option(
        3.0, "Mean number of tokens in a corrupted span, for span-corruption and denoise."
    )
    infilling: float = option(
        0.3, "For denoise: share of tokens in spans, each of which becomes one mask token."
    )
    permute_sentences: bool = option(True, "For denoise: put sentences in random order.")
    rotation: bool = option(False, "For denoise: let a text begin with a random token.")
    token_masking: float = option(0.0, "For denoise: share of tokens that become the mask token.")
    token_deletion: float = option(0.0, "For denoise: share of tokens that are deleted.")
    replacement: str = option(
        "uniform",
        "Distribution of the random tokens that replace some selected tokens: uniform, or unigram (by frequency).",
    )
    whole_word: bool = option(False, "Mask whole words.")
    static: bool = option(False, "Mask the same tokens of a sequence in every epoch.")
    alpha: float = option(
        ALPHA,
        "Exponent that smooths the sampling shares of a store's languages; 1 samples them by their size.",
    )

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
        for field in fields(self):
            takers = [name for name, each in OBJECTIVES.items() if field.name in each.options]
            if (
                takers
                and self.objective not in takers
                and getattr(self, field.name) != field.default
            ):
                raise ValueError(
                    f"{field.name} is an option of {', '.join(takers)}, got {getattr(self, field.name)} for "
                    f"{self.objective}: leave it out"
                )

    @property
    def definition(self) -> Objective:
        """The objective's model, collator and packings."""
        return OBJECTIVES[self.objective]

    def text_size(self, tokenizer: TokenizerLike) -> int:
        """Largest number of tokens of a text before it is corrupted, special tokens included.

        It is larger than ``block_size`` where a sequence holds only a part of the text: 569 of T5's tokens become a
        source of 512 and a target of 114.
        """
        length, added = self.definition.text_length, len(special_tokens(tokenizer).begin) + 1
        check_block_size(self.block_size)
        if length is None:
            return self.block_size
        return length(self.block_size - added, **self._given()) + added

    def pack(self, documents: Sequence[str], tokenizer: TokenizerLike) -> list[Any]:
        """The training examples of documents."""
        return PACKINGS[str(self.packing)](documents, tokenizer, self.text_size(tokenizer))

    def _given(self) -> dict[str, Any]:
        """The options of the objective."""
        return {name: getattr(self, name) for name in self.definition.options}

    def collator(
        self,
        tokenizer: TokenizerLike,
        examples: Sequence[Any],
        seed: int,
        counts: Any = None,
        start_id: int | None = None,
    ) -> Collator:
        """The collator of the objective.

        Args:
            examples: all examples of the data set.
            seed: seed of the collator's random numbers.
            counts: (vocabulary,) number of occurrences of each token, for replacement="unigram"; None: they are counted
                in the examples.
            start_id: first token of an encoder-decoder's decoder.
        """
        if self.replacement == "unigram" and counts is None:
            counts = count_tokens(map(token_ids, examples), tokenizer.get_vocab_size())
        options = self._given()
        if "replacement" in options:
            options["unigram_counts"] = counts
        if self.definition.has_decoder:
            options["start_id"] = start_id
        return self.definition.collator(tokenizer, examples, seed, **options)


@documented
@dataclass(frozen=True)
class NewModel:
    """A model with random weights, and the tokenizer that is trained for it.

    Raises: ValueError if ``heads`` does not divide ``hidden``, and for a family without a masked-LM head and without a
        decoder.
    """

    tokenizer: str | None = option(
        None,
        f"Tokenizer to train ({', '.join(MODEL_TYPES)}), or a folder with a tokenizer.json. A store already has a "
        "tokenizer. Default: t5 for span-corruption and ul2, bpe for denoise, else wordpiece.",
    )
    vocab_size: int = option(16000, "Vocabulary size of the tokenizer that is trained.")
    lowercase: bool | None = option(
        None,
        "Lower-case the texts and strip accents. Default: only for wordpiece.",
    )
    family: str | None = option(
        None,
        f"Architecture: {', '.join(FAMILIES)}. Default: electra for --objective electra, t5 for span-corruption and "
        "ul2, bart for denoise, else bert.",
    )
    layers: int = option(
        6, "Number of layers of a new model; of an encoder-decoder, of either part."
    )
    hidden: int = option(384, "Width of a new model.")
    heads: int | None = option(
        None,
        f"Number of attention heads of a new model. Default: one for every {HEAD_WIDTH} of the width.",
    )
    intermediate: int | None = option(
        None, "Inner width of a new model's feed-forward layers. Default: 4 times the width."
    )
    embedding_size: int | None = option(
        None,
        "Width of the embeddings of a new ELECTRA, ALBERT or DeBERTa. Default: 128 for ALBERT, else --hidden.",
    )
    generator_size: float | None = option(
        None,
        "Width of a new generator of the objective electra, as a share of the discriminator's. Default: 0.25.",
    )
    generator_layers: int | None = option(
        None, "Number of layers of a new generator. Default: --layers."
    )
    embedding_sharing: str | None = option(
        None,
        f"How generator and discriminator share embeddings: {SHARED} or {DISENTANGLED} (DeBERTa-v3). "
        f"Default: {SHARED}.",
    )
    mask_decoder: bool | None = option(
        None,
        "For mlm: predict through DeBERTa's enhanced mask decoder. With --from too; the checkpoint must have its "
        "position embeddings. Default: as the checkpoint says, and not in a new model.",
    )
    dropout: float = option(0.1, "Dropout probability of a new model, also in attention.")
    norm_eps: float | None = option(
        None, "Epsilon of a new model's norms. Default: the family's, such as 1e-12 for BERT."
    )

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.layers < 1:
            raise ValueError(
                f"hidden and layers must be at least 1, got {self.hidden} and {self.layers}: give more"
            )
        if self.intermediate is not None and self.intermediate < 1:
            raise ValueError(f"intermediate must be at least 1, got {self.intermediate}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.norm_eps is not None and not 0 <= self.norm_eps < math.inf:
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

    def check(self, objective: Objective) -> None:
        """Raises: ValueError for a family or a tokenizer that the objective's model cannot have."""
        if self.family not in (None, *(known := families_of(objective))):
            raise ValueError(
                f"family must be one of {', '.join(known)} for this objective, got {self.family}"
            )
        if self.tokenizer in MODEL_TYPES and self.tokenizer not in objective.tokenizers:
            raise ValueError(
                f"tokenizer must be one of {', '.join(objective.tokenizers)}, or a folder, for this objective, which "
                f"needs special tokens that others lack, got {self.tokenizer}: leave it out"
            )

    def make_tokenizer(
        self, documents: Sequence[str], objective: Objective = OBJECTIVES["mlm"]
    ) -> TokenizerLike:
        """The tokenizer of a folder, or one that is trained on the documents. Every process gets the same."""
        tokenizer = self.tokenizer or objective.tokenizers[0]
        if tokenizer not in MODEL_TYPES:
            return load_tokenizer(tokenizer)
        # Only the main process trains it, because Unigram's training is not deterministic.
        trained = lambda: train_tokenizer(
            documents, model_type=tokenizer, vocab_size=self.vocab_size, lowercase=self.lowercase
        ).to_str()
        return require("tokenizers", extra="models").Tokenizer.from_str(on_main_process(trained))

    def make(
        self, options: ObjectiveOptions, tokenizer: TokenizerLike, seed: int = 0
    ) -> PretrainedModel:
        """A model of the objective, with random weights and this tokenizer."""
        torch.manual_seed(seed)
        positions = max(512, options.block_size)
        special = special_tokens(tokenizer)
        model = self.build(options.definition, tokenizer.get_vocab_size(), special.pad, positions)
        # Under both pairs of names, because some of transformers' classes read one and some the other.
        ends = {"sep_token_id": special.sep, "eos_token_id": special.sep}
        for begin in special.begin:
            ends |= {"cls_token_id": begin, "bos_token_id": begin}
        if isinstance(model, Seq2Seq) and model.decoder_start_token_id is not None:
            # T5's decoder starts with the padding token, BART's with the end token.
            starts_with_end = model.decoder_start_token_id == model.config.architecture.eos_token_id
            ends["decoder_start_token_id"] = special.sep if starts_with_end else special.pad
        model.config.extra.update(ends)
        model.tokenizer = tokenizer
        return model

    def build(
        self, objective: Objective, vocab_size: int, pad_token_id: int, positions: int
    ) -> PretrainedModel:
        """A model of the objective with random weights.

        Args:
            pad_token_id: id of the padding token.
            positions: number of position embeddings.
        Raises: ValueError for a family that the objective's model cannot have, and for ``embedding_size``,
            ``mask_decoder`` or an option of the generator with a model that does not have it.
        """
        self.check(objective)
        family = architecture_named(self.family or objective.family)
        if self.embedding_size is not None and "embedding_size" not in family.config_names:
            raise ValueError(
                f"embedding_size is an option of ELECTRA, ALBERT and DeBERTa, got {self.embedding_size} for another "
                "family: leave it out"
            )
        names = ("generator_size", "generator_layers", "embedding_sharing")
        options: dict[str, Any] = {
            n: getattr(self, n) for n in names if getattr(self, n) is not None
        }
        if options and objective is not OBJECTIVES["electra"]:
            name, value = next(iter(options.items()))
            raise ValueError(
                f"{name} is an option of the objective electra, got {value} for another one: leave it out"
            )
        options |= self.mask_decoder_option(objective)
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
            else new.get("position_offset", 0),
            type_vocab_size=new.get("type_vocab_size", 2),
            activation=new.get("activation", "gelu"),
            eps=new.get("eps", 1e-12) if self.norm_eps is None else self.norm_eps,
            hidden_dropout_p=self.dropout,
            attention_dropout_p=self.dropout,
            pad_token_id=pad_token_id,
            pooler=family.has_pooler,
            family=self.family or objective.family,
            extra=family.new_extra(positions),
        )
        return objective.model(config, **options)

    def mask_decoder_option(self, objective: Objective) -> dict[str, bool]:
        """The argument of the objective's model, if ``mask_decoder`` is given.

        Raises: ValueError for another objective than mlm.
        """
        if self.mask_decoder is None:
            return {}
        if objective is not OBJECTIVES["mlm"]:
            raise ValueError(
                f"mask_decoder is an option of the objective mlm, got {self.mask_decoder} for another one: leave it out"
            )
        return {"mask_decoder": self.mask_decoder}


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
            stacklevel=2,
        )
    config = (
        config
        if config.learning_rate
        else replace(config, learning_rate=PretrainConfig.learning_rate)
    )
    start_id = model.decoder_start_token_id if isinstance(model, Seq2Seq) else None
    if options.definition.has_decoder:
        # A tokenizer without the tokens that the objective needs is refused before the texts are packed.
        options.collator(tokenizer, [], config.seed, start_id=start_id)
    counts, groups = None, None
    examples: Sequence[Any]
    held_out: Sequence[Any]
    if isinstance(train, TokenStore):
        store, key = train, (str(options.packing), options.text_size(tokenizer), config.seed)
        on_main_process(lambda: store.pack(*key))
        stored = store.examples(*key)
        examples, lengths, groups = stored, stored.lengths, stored.groups(options.alpha)
        held_out = (
            store.examples(*key, subset="held_out") if dev is None else options.pack(dev, tokenizer)
        )
        if not len(held_out):
            raise ValueError(
                f"{store.folder} has too few examples to hold some out, {len(examples)}: give dev"
            )
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
    held_out_collator = options.collator(tokenizer, held_out, config.seed + 1, counts, start_id)
    check_held_out(held_out, held_out_collator)
    return Trainer(
        model,
        config,
        examples,
        lengths,
        options.collator(tokenizer, examples, config.seed, counts, start_id),
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
            f"{len(examples):,} training sequences with {int(torch.as_tensor(lengths).sum()):,} tokens in all, "
            f"{len(held_out):,} sequences held out; vocabulary of {tokenizer.get_vocab_size():,} tokens"
        ],
        origin=origin,
        held_out=len(held_out),
        show_progress=show_progress,
    )


def hold_out(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """(documents to train on, held-out documents). One document in twenty is held out.

    Raises: ValueError for a single document.
    """
    kept = [d for index, d in enumerate(documents) if index % HELD_OUT_ONE_IN]
    if not kept:
        raise ValueError(
            f"there must be at least two documents, one of them held out, got {len(documents)}: give dev, or more "
            "documents"
        )
    return kept, list(documents[::HELD_OUT_ONE_IN])
