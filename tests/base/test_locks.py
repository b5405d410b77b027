"""Locks of files."""

import os
import signal

import pytest

from fastenc._base.locks import open_locked


def test_a_forked_child_does_not_hold_a_lock(tmp_path):
    """As the helper of a pool, which outlives its killed parent."""
    held = open_locked(tmp_path / "lock")
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, b"runs")
        signal.pause()
    try:
        os.read(reader, 4)
        with pytest.raises(BlockingIOError):
            open_locked(tmp_path / "lock")
        held.close()
        open_locked(tmp_path / "lock").close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
