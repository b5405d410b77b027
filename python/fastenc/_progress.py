"""A progress bar for terminals."""

import sys
import threading
from collections.abc import Iterable
from typing import Any

from fastenc._extras import require


def progress_bar(items: Iterable, what: str, unit: str, show: bool | None = None, **options: Any):
    """``items``, wrapped in a tqdm bar on stderr if it is to be shown.

    ``show=None`` shows the bar if stderr is a terminal and this is the main thread, because bars of several threads
    would overwrite each other.
    """
    if show is None:
        show = sys.stderr.isatty() and threading.current_thread() is threading.main_thread()
    if not show:
        return items
    return require("tqdm", extra="models").tqdm(items, desc=what, unit=unit, **options)
