"""Texts longer than a model's positions: what is kept of them, and how the rest is cut into chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastenc.models.windows import cut_windows

TRUNCATIONS = ("head", "tail", "head+tail")
AGGREGATIONS = ("mean", "max", "attention", "transformer")
# Of 510 tokens Sun et al. keep the first 128 and the last 382.
HEAD_TOKENS, ALL_TOKENS = 128, 510


@dataclass(frozen=True)
class LongTexts:
    """How a text becomes sequences of tokens; a classifier keeps it in config.json under ``long_texts``.

    Without chunks a text is one sequence, of which at most ``room`` tokens are kept, max_length less the special
    tokens. With chunks it is overlapping sequences of at most ``room`` tokens, each between special tokens of its own;
    what does not fit ``max_chunks`` of them is cut off first.

    Fields:
        max_length: tokens of a sequence, special tokens included.
        truncation: the tokens of a longer text that are kept: "head", the first; "tail", the last; "head+tail", of n
            the first n * 128 // 510 and the last of the others: 128 and 382 at max_length 512, 31 and 95 at 128, with
            two special tokens.
        chunks: how the vectors of a text's chunks become one (:mod:`fastenc.models.chunk_aggregation`); None for
            texts that are cut.
        stride: tokens that neighbouring chunks share. The last chunk begins earlier, so that it is full.
        max_chunks: most chunks of a text, which hold room + (max_chunks - 1) * (room - stride) tokens.
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
        """Tokens of a text that fit into a sequence beside ``special`` ones.

        Raises: ValueError when there is none, or chunks would share all of it.
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
        """The pieces of a text's tokens that are kept, each of at most ``room`` tokens; one without chunks."""
        if self.chunks is None:
            return [truncated(ids, room, self.truncation)]
        most = room + (self.max_chunks - 1) * (room - self.stride)
        kept = truncated(ids, most, self.truncation)
        return [kept[w.start : w.stop] for w in cut_windows(len(kept), room, self.stride)]


def truncated(ids: Sequence[int], room: int, truncation: str) -> Sequence[int]:
    """At most ``room`` of the tokens, as :class:`LongTexts` describes."""
    if len(ids) <= room or truncation == "head":
        return ids[:room]
    head = room * HEAD_TOKENS // ALL_TOKENS if truncation == "head+tail" else 0
    return [*ids[:head], *ids[len(ids) - (room - head) :]]
