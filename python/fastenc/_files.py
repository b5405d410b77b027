"""Writing files and folders so that a reader finds the old one or the new one, never half of it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` on a temporary file beside ``path``, flush it to the disk, and rename it into place.

    On any failure (a full disk) the temporary file is removed and ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` on an empty hidden folder beside ``folder``, flush it to the disk, and rename it into place.

    What a killed writer left there is removed first.
    """
    hidden = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        hidden.mkdir(parents=True)
        write(hidden)
        for path in (*hidden.rglob("*"), hidden):
            flush(path)
        os.replace(hidden, folder)
        flush(folder.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
