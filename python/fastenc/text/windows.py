"""Overlapping windows of a document that is longer than a model's positions.

Results for a token are taken from one window, which is said to own the token.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Window(NamedTuple):
    """The tokens [start, stop) of a document, and the tokens [own_start, own_stop) that the window owns."""

    start: int
    stop: int
    own_start: int
    own_stop: int


def cut_windows(length: int, room: int, stride: int | None = None) -> list[Window]:
    """Cut a document of ``length`` tokens into windows of at most ``room`` tokens.

    A token is owned by the window in which its distance to the nearer edge is largest; ties go to the first window. A
    document that fits is one window. The last window of a longer document begins earlier, so that it is full.

    Args: stride: number of tokens that neighbouring windows share, less than ``room``; None: half of it.
    """
    step = room - (room // 2 if stride is None else stride)
    last = max(0, length - room)
    spans = [(start, min(start + room, length)) for start in (*range(0, last, step), last)]
    return [Window(*span, *own) for span, own in zip(spans, owned(spans), strict=True)]


def owned(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The tokens [start, stop) that each of several overlapping spans owns, by the rule of :func:`cut_windows`.

    Args:
        spans: tokens [start, stop), with ascending starts and ascending stops.
    """
    # A span owns the tokens up to the middle of its overlap with the next span.
    middles = [(after + stop - 1) // 2 + 1 for (_, stop), (after, _) in pairwise(spans)]
    return list(zip([spans[0][0], *middles], [*middles, spans[-1][1]], strict=True))
