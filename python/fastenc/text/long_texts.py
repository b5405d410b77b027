"""Truncation of texts that are longer than a model's positions, or their division into chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastenc.text.windows import cut_windows

TRUNCATIONS = ("head", "tail", "head+tail")
AGGREGATIONS = ("mean", "max", "attention", "transformer")
# Sun et al. keep the first 128 and the last 382 of 510 tokens.
HEAD_TOKENS, ALL_TOKENS = 128, 510


@dataclass(frozen=True)
class LongTexts:
    """How a text is converted to sequences of tokens. A classifier stores it in config.json under ``long_texts``.

    A sequence has room for ``room`` tokens of the text, which is max_length minus the number of special tokens. Without
    chunks a longer text is truncated to one sequence. With chunks it is divided into overlapping sequences, each with
    special tokens; a text that does not fit into ``max_chunks`` is truncated first.

    Fields:
        max_length: largest number of tokens of a sequence, special tokens included.
        truncation: the n tokens that are kept of a longer text: "head", the first n; "tail", the last n; "head+tail",
            the first n * 128 // 510 and then the last ones. With two special tokens that is 128 + 382 tokens for
            max_length 512, and 31 + 95 for 128.
        chunks: how the vectors of a text's chunks are aggregated
            (:mod:`fastenc.models.heads.chunk_aggregation`): "mean", "max", "attention" or "transformer"; None:
            truncate, without chunks.
        stride: number of tokens that neighbouring chunks share. The last chunk begins earlier, so that it is full.
        max_chunks: largest number of chunks of a text; they have room + (max_chunks - 1) * (room - stride) tokens.
    Raises: ValueError naming the field, the rule and the value.
    Source: Sun et al. 2019, arXiv:1905.05583, section 5.3.1.
    """

    max_length: int = 128
    truncation: str = "head"
    chunks: str | None = None
    stride: int = 32
    max_chunks: int = 32

    def __post_init__(self) -> None:
        for name, known in (("truncation", TRUNCATIONS), ("chunks", (None, *AGGREGATIONS))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(filter(None, known))}, got {getattr(self, name)!r}"
                )
        for name, least in (("max_length", 1), ("stride", 0), ("max_chunks", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def room(self, special: int) -> int:
        """The number of a text's tokens that fit into a sequence with ``special`` special tokens.

        Raises: ValueError if it is not positive, or if ``stride`` is not smaller.
        """
        room = self.max_length - special
        if room < 1:
            raise ValueError(
                f"max_length must leave room beside {special} special tokens, got {self.max_length}: give more"
            )
        if self.chunks is not None and self.stride >= room:
            raise ValueError(
                f"stride must be less than the {room} tokens of a text that a chunk of max_length={self.max_length} "
                f"holds, got {self.stride}: give a smaller stride or a larger max_length"
            )
        return room

    def cut(self, ids: Sequence[int], room: int) -> list[Sequence[int]]:
        """The chunks of a text, each of at most ``room`` tokens; without chunks the truncated text."""
        if self.chunks is None:
            return [truncated(ids, room, self.truncation)]
        max_tokens = room + (self.max_chunks - 1) * (room - self.stride)
        kept = truncated(ids, max_tokens, self.truncation)
        return [kept[w.start : w.stop] for w in cut_windows(len(kept), room, self.stride)]


def truncated(ids: Sequence[int], room: int, truncation: str) -> Sequence[int]:
    """At most ``room`` of the tokens, selected by ``truncation`` (:class:`LongTexts`)."""
    if len(ids) <= room or truncation == "head":
        return ids[:room]
    head = room * HEAD_TOKENS // ALL_TOKENS if truncation == "head+tail" else 0
    return [*ids[:head], *ids[len(ids) - (room - head) :]]
