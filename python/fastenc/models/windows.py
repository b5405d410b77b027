"""Overlapping windows over a document that is longer than a model's positions. One window owns each token."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Window(NamedTuple):
    """Tokens [start, stop) of a document. The window owns those in [own_start, own_stop)."""

    start: int
    stop: int
    own_start: int
    own_stop: int


def cut_windows(length: int, room: int, stride: int | None = None) -> list[Window]:
    """Windows of at most ``room`` tokens. Neighbours share ``stride`` tokens, fewer than room (None: half of it).

    A token is owned by the window in which it is farthest from the nearer edge; of equal windows, by the first. A
    document that fits is one window. The last window of a longer document begins earlier, so that it is full.
    """
    step = room - (room // 2 if stride is None else stride)
    last = max(0, length - room)
    spans = [(start, min(start + room, length)) for start in (*range(0, last, step), last)]
    return [Window(*span, *part) for span, part in zip(spans, owned(spans), strict=True)]


def owned(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The tokens [start, stop) that each of several overlapping spans owns, by the rule of :func:`cut_windows`.

    Args:
        spans: tokens [start, stop), each beginning and ending after the one before.
    """
    # The farther edge wins up to the middle of the overlap with the next span.
    middles = [(after + stop - 1) // 2 + 1 for (_, stop), (after, _) in pairwise(spans)]
    return list(zip([spans[0][0], *middles], [*middles, spans[-1][1]], strict=True))
