"""Documents longer than a model's positions: overlapping windows, each token taken from one of them."""

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
    starts = [*range(0, last, step), last]
    windows, own = [], 0
    for start, after in zip(starts, [*starts[1:], None], strict=True):
        stop = min(start + room, length)
        # The farther edge wins up to the middle of the overlap with the next window.
        own_stop = length if after is None else (after + stop - 1) // 2 + 1
        windows.append(Window(start, stop, own, own_stop))
        own = own_stop
    return windows
