"""A progress bar for terminals, and lines for log files."""

import sys
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from fastenc._base.extras import require

LINE_SECONDS = 10.0  # between two lines of a counter without a terminal


def progress_bar(items: Iterable, what: str, unit: str, show: bool | None = None, **options: Any):
    """``items``, wrapped in a tqdm bar on stderr if it is to be shown.

    ``show=None`` shows the bar if stderr is a terminal and this is the main thread, because bars of several threads
    would overwrite each other.
    """
    if show is None:
        show = sys.stderr.isatty() and _in_main_thread()
    if not show:
        return items
    return require("tqdm", extra="models").tqdm(items, desc=what, unit=unit, **options)


def unless_few(show: bool | None, steps: int) -> bool | None:
    """``show`` for :func:`progress_bar`, where None shows no bar for ten steps or fewer."""
    return False if show is None and steps <= 10 else show


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Counter:
    """Shows on stderr how many items are finished and how long the rest will take. A context manager.

    On a terminal it is a tqdm bar, elsewhere, such as in a log file, a line every ``LINE_SECONDS``.

    Args:
        what: the activity, such as "embedding".
        unit: name of the items in the plural, such as "texts".
        total: number of items.
        done: number of items that an earlier run finished.
        show: False: show nothing. True: the bar. None: the bar or the lines, in the main thread.
    """

    def __init__(self, what: str, unit: str, total: int, done: int = 0, show: bool | None = None):
        self.what, self.unit, self.total, self.done = what, unit, total, done
        shows_bar = sys.stderr.isatty() and _in_main_thread() if show is None else show
        self._prints_lines = show is None and not shows_bar and _in_main_thread()
        self._bar: Any = None
        if shows_bar:
            bar = require("tqdm", extra="models").tqdm
            self._bar = bar(desc=what, unit=f" {unit}", total=total, initial=done)
        self._first, self._start = done, time.monotonic()
        self._last_line = self._start

    def __enter__(self) -> "Counter":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, number: int) -> None:
        """Count this number of items as finished."""
        self.done += number
        if self._bar is not None:
            self._bar.update(number)
        now = time.monotonic()
        if self._prints_lines and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            print(self.line(now - self._start), file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """What is finished after this time, the speed, and the time that is left."""
        speed = (self.done - self._first) / seconds
        left = timedelta(seconds=round((self.total - self.done) / speed)) if speed else "unknown"
        rate = f", {speed:,.1f} {self.unit}/s" if speed >= 1 else ""
        return f"{self.what}: {self.done:,} of {self.total:,} {self.unit}{rate}, {left} left"
