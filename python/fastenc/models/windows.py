"""Documents longer than a model's positions: overlapping windows, each token taken from one of them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Window(NamedTuple):
    """Tokens [start, stop) of a document, of which those in [own_start, own_stop) are taken from this window."""

    start: int
    stop: int
    own_start: int
    own_stop: int


def cut_windows(length: int, room: int, stride: int | None = None) -> list[Window]:
    """Windows of at most ``room`` tokens that share ``stride``, less than room (None: half of it); each token is owned
    by the window in which it is most central, that is, farthest from the nearer edge (of equals, by the first).

    A document that fits is one window; the last window of a longer one is moved back so that it is full.
    """
    step = room - (room // 2 if stride is None else stride)
    last = max(0, length - room)
    spans = [(start, min(start + room, length)) for start in (*range(0, last, step), last)]
    return [Window(*span, *own) for span, own in zip(spans, owned(spans), strict=True)]


def owned(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The tokens [start, stop) that each of overlapping spans owns, by the rule of :func:`cut_windows`.

    Args:
        spans: tokens [start, stop), each beginning and ending after the one before.
    """
    # The farther edge wins up to the middle of the overlap with the next span.
    middles = [(after + stop - 1) // 2 + 1 for (_, stop), (after, _) in pairwise(spans)]
    return list(zip([spans[0][0], *middles], [*middles, spans[-1][1]], strict=True))
