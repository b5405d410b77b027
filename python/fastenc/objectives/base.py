"""What a pretraining objective is: a model, a collator, and the packings of text that it accepts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from fastenc.data import doc_sentence_blocks, full_sentence_blocks, segment_pairs
from fastenc.models.heads.masked_lm import MaskedLM
from fastenc.models.heads.seq2seq import Seq2Seq
from fastenc.models.pretrained import PretrainedModel
from fastenc.packing import ModelArguments

PACKINGS: dict[str, Callable[..., list[Any]]] = {
    "full-sentences": full_sentence_blocks,
    "doc-sentences": doc_sentence_blocks,
    "segment-pairs": segment_pairs,
}


class Collator(Protocol):
    """Corrupts and packs examples on the host.

    If the model's loss has several terms, the collator also needs a method ``items(arguments)``
    (:func:`fastenc.objectives.loss_terms.count_items`).
    """

    def __call__(self, examples: Sequence[Any], step: int, /) -> ModelArguments:
        """The model's arguments, by name.

        Args:
            step: number of the micro-batch. The random numbers depend on the collator's seed and ``step`` only.
        """


def token_ids(example: object) -> Sequence[int]:
    """The token ids of an example: a block is a sequence of ids, other examples have a field ``ids``."""
    return cast(Sequence[int], getattr(example, "ids", example))


@dataclass(frozen=True)
class Objective:
    """A pretraining objective. ``OBJECTIVES`` names the instances.

    Fields:
        model: class of the model. Its forward takes the collator's dictionary as arguments and returns an output with
            the loss and its terms.
        packings: the packings that the objective accepts, names in ``PACKINGS``; the first is the default.
        collator: function of (tokenizer, examples, seed, **options) that returns the collator. ``examples`` are all
            examples of the data set. For an encoder-decoder it also takes ``start_id``, the decoder's first token.
        family: architecture family of a model with random weights.
        tokenizers: the tokenizers that can be trained for such a model, of
            ``fastenc.data.tokenizer_training.MODEL_TYPES``; the first is the default.
        options: names of the fields of ``ObjectiveOptions`` that the collator takes. Of "replacement", it also takes
            ``unigram_counts``.
        text_length: function of (number of tokens that a sequence has room for, **options) that returns the largest
            number of tokens of a text, special tokens excluded both times. It is larger where a sequence holds only a
            part of the text. None: the same number.
        student: function of (teacher, number of layers) that returns the model, for an objective with a teacher; None
            for the others. The model's ``from_pretrained`` then also takes ``teacher``.
    """

    model: type[PretrainedModel]
    packings: tuple[str, ...]
    collator: Callable[..., Collator]
    family: str = "bert"
    tokenizers: tuple[str, ...] = ("wordpiece", "bpe", "unigram")
    options: tuple[str, ...] = ("probability", "replacement", "whole_word", "static")
    text_length: Callable[..., int] | None = None
    student: Callable[[MaskedLM, int], PretrainedModel] | None = None

    @property
    def has_decoder(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return issubclass(self.model, Seq2Seq)
