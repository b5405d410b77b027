"""A lock that allows one run at a time in an output folder."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from fastenc.train.processes import process_state

try:
    import fcntl
except ImportError:  # Windows has no such locks: there the folder is not locked
    fcntl = None  # type: ignore[assignment]

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
    if fcntl is None or path in _held or not process_state().is_main_process:
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


def _locked(path: Path, folder: str) -> IO[str]:
    """The open lock file, after it is locked."""
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115, it stays open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                raise ValueError(_in_use(file.read(), folder)) from None
        # An earlier run may have removed the file after it was opened here and before it was locked.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()
    file.truncate(0)
    started = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    json.dump({"process": os.getpid(), "host": socket.gethostname(), "started": started}, file)
    file.flush()
    return file


def _in_use(content: str, folder: str) -> str:
    with suppress(ValueError, KeyError):
        holder = json.loads(content)
        return (
            f"{folder} is the output of another run, process {holder['process']} on {holder['host']}, started "
            f"{holder['started']}: wait for it, end it, or give another output folder (-o)"
        )
    return f"{folder} is the output of another run: wait for it, or give another output folder (-o)"
