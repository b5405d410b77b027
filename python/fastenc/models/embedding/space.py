"""Whether vectors fit into memory, or on a disk."""

import shutil
from pathlib import Path

import torch


def check_space(shape: tuple[int, int], dtype: torch.dtype, out: str | Path | None = None) -> None:
    """Raise ValueError if vectors of this shape and dtype do not fit into memory or, with ``out``, on the disk."""
    needed = shape[0] * shape[1] * dtype.itemsize
    if out is None:
        place, free = "the memory", _free_memory()
        remedy = "give fewer texts, stream to a file (out=, fastenc embed --words)"
    else:
        folder = next(parent for parent in Path(out).absolute().parents if parent.exists())
        place, free = str(folder), shutil.disk_usage(folder).free
        remedy = "free some, or take another disk"
    if free is not None and needed > free:
        raise ValueError(
            f"{shape[0]:,} vectors of {shape[1]} numbers need {needed / 2**30:.1f} GiB, "
            f"{place} has {free / 2**30:.1f} GiB free: {remedy}, or take fewer layers"
        )


def _free_memory() -> int | None:
    """Bytes of memory that are available without swapping; None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line), None)
