"""A progress bar on a terminal, nothing elsewhere."""

import sys
import threading
from collections.abc import Iterable
from typing import Any

from fastenc._extras import require


def progress_bar(items: Iterable, what: str, unit: str, show: bool | None = None, **options: Any):
    """``items`` behind a tqdm bar on stderr; ``show=None`` asks whether stderr is a terminal, and whether this is the
    main thread: another's bar would be written over its."""
    if show is None:
        show = sys.stderr.isatty() and threading.current_thread() is threading.main_thread()
    if not show:
        return items
    return require("tqdm", extra="models").tqdm(items, desc=what, unit=unit, **options)
