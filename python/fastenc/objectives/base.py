"""What a pretraining objective is made of."""

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
    """Corrupts and packs examples on the host; may have ``items(arguments)``, see ``fastenc.objectives.parts``."""

    def __call__(self, examples: Sequence[Any], step: int, /) -> dict[str, Any]:
        """The model's arguments; random numbers depend on the collator's seed and ``step`` alone."""


def token_ids(example: Any) -> Sequence[int]:
    """A block is its token ids; other examples have them in ``ids``."""
    return getattr(example, "ids", example)


@dataclass(frozen=True)
class Objective:
    """One way to pretrain: an instance in a file of this folder, and its name in ``OBJECTIVES``.

    Fields:
        model: its forward takes the collator's dictionary and returns an output with the loss and its parts.
        packings: names in ``PACKINGS`` of the examples it can take, the usual one first.
        collator: (tokenizer, examples, seed, **options of ``MlmCollator``) → collator; ``examples`` are all that it
            will be asked for.
        family: of a new model.
        student: (teacher, number of layers) → model, for an objective with a teacher: its ``model.from_pretrained``
            takes ``teacher`` too.
    """

    model: type[PretrainedModel]
    packings: tuple[str, ...]
    collator: Callable[..., Collator]
    family: str = "bert"
    student: Callable[[MaskedLM, int], PretrainedModel] | None = None
