"""The options of pretraining: what a model learns to predict, and how texts become examples."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from fastenc._base.options import documented, option
from fastenc.data.blocks import check_block_size
from fastenc.data.languages import ALPHA, check_alpha
from fastenc.objectives import OBJECTIVES, PACKINGS, Collator, Objective, count_tokens, token_ids
from fastenc.text import special_tokens
from fastenc.text.tokenizer_like import TokenizerLike


@documented
@dataclass(frozen=True)
class ObjectiveOptions:
    """What a model is trained to predict, and how texts become training examples.

    Raises: ValueError for an unknown objective, for a packing or another option that the objective does not take, and
        for an ``alpha`` outside [0, 1].
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
        check_alpha(self.alpha)
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
