"""Runs the code of a document in a process of its own, with the libraries that most documents import already there.

A server imports them once and forks for each document, because an import takes seconds and a test a moment.
"""

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import transformers

import fastenc

# The server imports this module, and so these attributes, which transformers and fastenc load when they are read.
_LOADED = transformers.AutoModel, fastenc.Encoder, fastenc.patch
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([__name__])
TIMEOUT = 300  # seconds


def run_page(codes: list[str], folder: Path, errors: Sequence[dict]) -> None:
    """Run blocks one after another in the folder; each has a namespace, so none uses another's imports.

    Args:
        errors: arguments of warnings.filterwarnings, for warnings that are errors.
    Raises: AssertionError with what the process printed, if a block fails.
    """
    output = folder / "output.txt"
    process = _SERVER.Process(target=_run, args=(codes, folder, errors, output))
    process.start()
    process.join(TIMEOUT)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode == 0, output.read_text()[-5000:]


def _run(codes: list[str], folder: Path, errors: Sequence[dict], output: Path) -> None:
    os.chdir(folder)
    for each in errors:
        warnings.filterwarnings("error", **each)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            for number, code in enumerate(codes):
                exec(compile(code, f"block {number}", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            raise SystemExit(1) from None
