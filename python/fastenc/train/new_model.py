"""A model with random weights for pretraining, and its tokenizer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from fastenc._base.extras import require
from fastenc._base.options import documented, option
from fastenc.data import train_tokenizer
from fastenc.data.tokenizer_training import MODEL_TYPES
from fastenc.models import EncoderConfig, Seq2Seq
from fastenc.models.architectures import ARCHITECTURES, architecture_named
from fastenc.models.pretrained import PretrainedModel
from fastenc.objectives import OBJECTIVES, Objective
from fastenc.objectives.electra import DISENTANGLED, SHARED
from fastenc.text import load_tokenizer, special_tokens
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.train.objective_options import ObjectiveOptions
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
        "Width of the embeddings of a new ELECTRA, ALBERT, DeBERTa, RemBERT or RoFormer. Default: 128 for ALBERT, 256 "
        "for RemBERT, else --hidden.",
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
            starts = {"end": special.sep, "padding": special.pad}
            ends["decoder_start_token_id"] = starts[model.config.architecture.target_start]
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
                "embedding_size is an option of ELECTRA, ALBERT, DeBERTa, RemBERT and RoFormer, got "
                f"{self.embedding_size} for another family: leave it out"
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
        # As a resumed run reads it: a family's file does not have every field.
        config = EncoderConfig.from_hf(config.to_hf())
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
