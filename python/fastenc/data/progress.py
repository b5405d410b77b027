"""A progress bar on a terminal, nothing elsewhere."""

import sys
from collections.abc import Iterable
from typing import Any

from fastenc._extras import require


def progress_bar(items: Iterable, what: str, unit: str, show: bool | None = None, **options: Any):
    """``items`` behind a tqdm bar on stderr; ``show=None`` asks whether stderr is a terminal."""
    if show is None:
        show = sys.stderr.isatty()
    if not show:
        return items
    return require("tqdm", extra="models").tqdm(items, desc=what, unit=unit, **options)
