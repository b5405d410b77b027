"""A lock that allows one run at a time in an output folder."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from fastenc._base.locks import open_locked
from fastenc.train.processes import process_state

NAME = ".lock"
_held: set[Path] = set()


@contextmanager
def output_lock(folder: str | Path) -> Iterator[None]:
    """A context that locks a folder for this run. The folder is made if it does not exist, and removed if it is empty
    at the end.

    The operating system releases the lock when the process ends for any reason, so the lock file of a killed run blocks
    nothing. Only the main process of a run takes the lock. A process may take it again while it has it.
    Raises: ValueError with the process that has the lock, and its start.
    """
    path = Path(folder).resolve() / NAME
    if path in _held or not process_state().is_main_process:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _locked(path, str(folder))
    try:
        _held.add(path)
        yield
    finally:
        _held.discard(path)
        with suppress(OSError):
            path.unlink(missing_ok=True)
        file.close()
        with suppress(OSError):
            path.parent.rmdir()  # fails if the folder has files


def _locked(path: Path, folder: str) -> IO[bytes]:
    """The open lock file, after it is locked."""
    try:
        file = open_locked(path)
    except BlockingIOError:
        raise ValueError(_in_use(path, folder)) from None
    file.truncate(0)
    started = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    holder = {"process": os.getpid(), "host": socket.gethostname(), "started": started}
    file.write(json.dumps(holder).encode())
    return file


def _in_use(path: Path, folder: str) -> str:
    with suppress(OSError, ValueError, KeyError):
        holder = json.loads(path.read_text(encoding="utf-8"))
        return (
            f"{folder} is the output of another run, process {holder['process']} on {holder['host']}, started "
            f"{holder['started']}: wait for it, end it, or give another output folder"
        )
    return f"{folder} is the output of another run: wait for it, or give another output folder"
