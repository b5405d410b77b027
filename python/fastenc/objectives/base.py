"""A pretraining objective: a model, a collator and the examples that it takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastenc.data import doc_sentence_blocks, full_sentence_blocks, segment_pairs
from fastenc.models.masked_lm import MaskedLM
from fastenc.models.pretrained import PretrainedModel

PACKINGS: dict[str, Callable[..., list[Any]]] = {
    "full-sentences": full_sentence_blocks,
    "doc-sentences": doc_sentence_blocks,
    "segment-pairs": segment_pairs,
}


class Collator(Protocol):
    """Corrupts and packs examples on the host.

    A collator whose model's loss has several terms also has ``items(arguments)``
    (:func:`fastenc.objectives.loss_terms.count_items`).
    """

    def __call__(self, examples: Sequence[Any], step: int, /) -> dict[str, Any]:
        """The model's arguments. Random numbers depend on the collator's seed and ``step`` only."""


def token_ids(example: Any) -> Sequence[int]:
    """The token ids of an example: a block is the sequence of its ids, other examples have a field ``ids``."""
    return getattr(example, "ids", example)


@dataclass(frozen=True)
class Objective:
    """One way to pretrain. Each file of this folder holds an instance; ``OBJECTIVES`` gives it a name.

    Fields:
        model: its forward takes the collator's dictionary and returns an output with the loss and its terms.
        packings: names in ``PACKINGS`` of the examples that it takes; the first is the default.
        collator: (tokenizer, examples, seed, **options of ``MlmCollator``) → collator. ``examples`` are all examples
            of the data set.
        family: architecture family of a model that is trained from scratch.
        student: (teacher, number of layers) → model, for an objective with a teacher. The model's
            ``from_pretrained`` then takes ``teacher`` too.
    """

    model: type[PretrainedModel]
    packings: tuple[str, ...]
    collator: Callable[..., Collator]
    family: str = "bert"
    student: Callable[[MaskedLM, int], PretrainedModel] | None = None
