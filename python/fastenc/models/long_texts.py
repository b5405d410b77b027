"""How texts that are longer than a model's positions are cut, or divided into chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastenc.models.windows import cut_windows

TRUNCATIONS = ("head", "tail", "head+tail")
AGGREGATIONS = ("mean", "max", "attention", "transformer")
# Sun et al. keep the first 128 and the last 382 of 510 tokens.
HEAD_TOKENS, ALL_TOKENS = 128, 510


@dataclass(frozen=True)
class LongTexts:
    """How a text becomes sequences of tokens. A classifier stores it in config.json under ``long_texts``.

    ``room`` is max_length minus the special tokens. Without chunks a text is one sequence of at most ``room`` tokens.
    With chunks it is several overlapping sequences of at most ``room`` tokens, each with its special tokens; a text
    that does not fit into ``max_chunks`` is truncated first.

    Fields:
        max_length: tokens of a sequence, special tokens included.
        truncation: the tokens that are kept of a longer text: "head", the first n; "tail", the last n; "head+tail",
            the first n * 128 // 510 and the last of the n: 128 and 382 at max_length 512, 31 and 95 at 128, with two
            special tokens.
        chunks: how the vectors of a text's chunks become one (:mod:`fastenc.models.chunk_aggregation`); None cuts.
        stride: number of tokens that neighbouring chunks share. The last chunk begins earlier, so that it is full.
        max_chunks: largest number of chunks of a text; they hold room + (max_chunks - 1) * (room - stride) tokens.
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

        Raises: ValueError if there is no room, or if ``stride`` is not smaller than it.
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
        """The pieces of a text that are kept, each of at most ``room`` tokens; a single one without chunks."""
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
