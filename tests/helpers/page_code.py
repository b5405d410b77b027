"""Runs the code of a document in a process of its own."""

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.helpers.processes import fork

TIMEOUT = 300  # seconds


def run_page(codes: list[str], folder: Path, errors: Sequence[dict]) -> None:
    """Run blocks one after another in the folder; each has a namespace, so none uses another's imports.

    Args:
        errors: arguments of warnings.filterwarnings, for warnings that are errors.
    Raises: AssertionError with what the process printed, if a block fails.
    """
    done = fork(_run, (codes, errors), folder, TIMEOUT, "page")
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


def _run(codes: list[str], errors: Sequence[dict]) -> None:
    for each in errors:
        warnings.filterwarnings("error", **each)
    with ExitStack() as stack:
        if any("fastenc.train" in code for code in codes):
            from tests.helpers.curves import without_curves  # it imports torch

            stack.enter_context(without_curves())
        for number, code in enumerate(codes):
            exec(compile(code, f"block {number}", "exec"), {"__name__": "__main__"})
