"""Writing files and folders so that a reader finds the old one or the new one, never half of it."""

import glob
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path, PurePath


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


def member(folder: Path, name: str, listed_in: Path) -> Path:
    """The path of what a file lists as ``name`` in ``folder``.

    The name alone is judged, because a hub's cache keeps links to files that lie elsewhere.
    Raises: ValueError for a name that leaves the folder.
    """
    relative = PurePath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise ValueError(
            f"{listed_in} must name files inside its folder, got {name!r}: "
            "put the file there, and correct the name"
        )
    return folder / relative


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` on an empty hidden folder beside ``folder``, flush it to the disk, and rename it into place.

    Where two write the same folder at once, the first that is done gives it. What a writer of this machine that was
    killed left there is removed.
    """
    mine = f".{folder.name}.{socket.gethostname()}."
    for left in folder.parent.glob(f"{glob.escape(mine)}*.tmp"):
        if not _is_running(left.name.removeprefix(mine).removesuffix(".tmp")):
            shutil.rmtree(left, ignore_errors=True)
    hidden = folder.with_name(f"{mine}{os.getpid()}.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        hidden.mkdir(parents=True)
        write(hidden)
        for path in (*hidden.rglob("*"), hidden):
            flush(path)
        try:
            os.replace(hidden, folder)
        except OSError:
            if not folder.is_dir():
                raise
        flush(folder.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _is_running(process: str) -> bool:
    if os.name == "nt":  # where asking would be a signal
        return True
    try:
        os.kill(int(process), 0)
    except (OSError, ValueError):
        return False
    return True


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
