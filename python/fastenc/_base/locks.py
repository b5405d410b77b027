"""Locks of files, so that two processes do not write the same one."""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO
from weakref import WeakSet

try:
    import fcntl
except ImportError:  # Windows has no such locks: there nothing is locked
    fcntl = None  # type: ignore[assignment]

_locked_files: WeakSet[IO[bytes]] = WeakSet()


def _close_locked_files() -> None:
    for file in _locked_files:
        file.close()


if fcntl is not None:
    # A forked child, such as a pool's helper, would keep the locks after its parent was killed.
    os.register_at_fork(after_in_child=_close_locked_files)


def open_locked(path: Path) -> IO[bytes]:
    """A file that is open for reading and writing without a buffer and locked for this process. It is made if it does
    not exist.

    The operating system releases the lock when the file is closed or the process ends for any reason, also if a child
    that it has forked goes on.
    Raises: BlockingIOError if it is locked.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        file = os.fdopen(descriptor, "r+b", buffering=0)
        if fcntl is None:
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have renamed or removed the file after it was opened here and before it was locked.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    _locked_files.add(file)
                    return file
        except BaseException:
            file.close()
            raise
        file.close()
