"""Atomic writes of files and folders: a reader finds the old content or the new one, never an incomplete one."""

import glob
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path, PurePath


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` on a temporary file beside ``path``, flush it to the disk, and rename it into place.

    If anything fails, such as on a full disk, the temporary file is removed and ``path`` is unchanged.
    Raises: OSError with the path if the operating system refuses, also where a library reports that as an error of its
        own.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        permissions = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(permissions)  # safetensors makes a file that only its owner may read
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # which a full disk's error does not name
        temporary.unlink(missing_ok=True)
        if refusal := _refusal_in(error, path):
            raise refusal from error
        raise


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text in UTF-8, as :func:`write_atomically` writes."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _refusal_in(error: BaseException, path: Path) -> OSError | None:
    """The operating system's error that tokenizers and safetensors, which are in Rust, report as text."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is None:
        return None
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path))


def member(folder: Path, name: str, listed_in: Path) -> Path:
    """The path of a file that ``listed_in`` names relative to ``folder``.

    Links are not resolved, because the hub's cache consists of links to files in other folders.
    Raises: ValueError for a name that points outside the folder (absolute, or with "..").
    """
    relative = PurePath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise ValueError(
            f"{listed_in} must name files inside its folder, got {name!r}: "
            "put the file there, and correct the name"
        )
    return folder / relative


def check_not_input(output: Path, *inputs: str | Path) -> None:
    """Raises: ValueError if the output is one of the inputs, which writing would replace."""
    for path in map(Path, inputs):
        if output.exists() and path.exists() and output.samefile(path):
            raise ValueError(
                f"the output must not be the input, got {output} for both: give another file"
            )


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` on an empty hidden folder beside ``folder``, flush it to the disk, and rename it into place.

    If two processes write the same folder at the same time, the first one to finish wins. Hidden folders that killed
    processes of this machine left behind are removed.
    """
    prefix = f".{folder.name}.{socket.gethostname()}."
    for stale in folder.parent.glob(f"{glob.escape(prefix)}*.tmp"):
        if not _is_running(stale.name.removeprefix(prefix).removesuffix(".tmp")):
            shutil.rmtree(stale, ignore_errors=True)
    hidden = folder.with_name(f"{prefix}{os.getpid()}.tmp")
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
    except Exception as error:
        if refusal := _refusal_in(error, folder):
            raise refusal from error
        raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _is_running(process: str) -> bool:
    if os.name == "nt":  # os.kill would end the process there
        return True
    try:
        os.kill(int(process), 0)
    except (OSError, ValueError):
        return False
    return True


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, is on the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
