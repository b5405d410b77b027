"""What a pretraining objective is: a model, a collator, and the packings of text that it accepts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from fastenc.data import doc_sentence_blocks, full_sentence_blocks, segment_pairs
from fastenc.models.heads.masked_lm import MaskedLM
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
        collator: function of (tokenizer, examples, seed, **options of ``MlmCollator``) that returns the collator.
            ``examples`` are all examples of the data set.
        family: architecture family of a model with random weights.
        student: function of (teacher, number of layers) that returns the model, for an objective with a teacher; None
            for the others. The model's ``from_pretrained`` then also takes ``teacher``.
    """

    model: type[PretrainedModel]
    packings: tuple[str, ...]
    collator: Callable[..., Collator]
    family: str = "bert"
    student: Callable[[MaskedLM, int], PretrainedModel] | None = None
