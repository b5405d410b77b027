"""Run cases one after the other in processes that may die, and write each result when its case ends.

A case that raises is written as failed, and the next one runs. A case can also end its process: by a hang, a crash or
an error that leaves the CUDA context unusable. Then the parent process writes it as failed, and a new process goes on
with the next case.
"""

import faulthandler
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastenc._base.files import write_text_atomically

AGAIN = 75  # exit code: this process cannot run another case
Case = tuple[str, Callable[[], dict[str, Any]]]


class Report:
    """The file of all results: {"machine": ..., section: {"cases": {case: row}, "seconds": ..., "running": case}}."""

    def __init__(self, path: Path):
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def write(self) -> None:
        write_text_atomically(self.path, json.dumps(self.content, indent=1))

    def section(self, name: str) -> dict[str, Any]:
        return self.content.setdefault(name, {"cases": {}, "seconds": 0.0, "running": None})

    def forget(self, name: str) -> None:
        self.content.pop(name, None)
        self.write()

    def begin(self, name: str, case: str) -> None:
        self.section(name)["running"] = case
        self.write()

    def end(self, name: str, case: str, row: dict[str, Any], seconds: float = 0.0) -> None:
        section = self.section(name)
        section["cases"][case] = row
        section["seconds"] += seconds
        section["running"] = None
        self.write()

    def failed(self, name: str) -> list[str]:
        """Cases that failed or whose result is wrong."""
        rows = self.section(name)["cases"].items()
        return [case for case, row in rows if "failed" in row or row.get("right") is False]


def synchronize() -> None:
    torch = sys.modules.get("torch")  # without torch no kernel is under way
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def device_works() -> bool:
    """Whether the CUDA context still accepts work. An illegal memory access, for example, ends it for the whole
    process."""
    try:
        synchronize()
    except Exception:
        return False
    return True


def run_cases(
    report: Report,
    section: str,
    cases: Iterable[Case],
    *,
    limit: float | None = None,
    works: Callable[[], bool] = device_works,
) -> int:
    """Run the cases that the report lacks.

    Args:
        limit: seconds that a case may take, after which the process ends; None: no limit.
        works: called after a failure; says whether this process can go on.
    Returns: 0 after the last case, else AGAIN.
    """
    done = set(report.section(section)["cases"])
    report.write()  # the report exists even without a case
    for name, run_case in cases:
        if name in done:
            continue
        report.begin(section, name)
        start = time.perf_counter()
        if limit is not None:
            # A thread of C ends the process: Python code may not run any more.
            faulthandler.dump_traceback_later(limit, exit=True)
        try:
            row = run_case()
            synchronize()  # an error of this case's kernels is its own
        except Exception as error:
            traceback.print_exc(limit=-4)
            row = {"failed": f"{type(error).__name__}: {error}"[:500]}
        finally:
            if limit is not None:
                faulthandler.cancel_dump_traceback_later()
        if "failed" in row:
            print(f"  FAILED {name}: {row['failed'][:150]}", flush=True)
        report.end(section, name, row, time.perf_counter() - start)
        if "failed" in row and not works():
            return AGAIN
    return 0


def unless_wrong(cases: Iterable[Case], wrong: Container[str]) -> Iterator[Case]:
    """The cases, but those in ``wrong`` fail at once: a case with wrong results is not timed."""
    for name, run_case in cases:
        yield name, _refused if name in wrong else run_case


def _refused() -> dict[str, Any]:
    return {"failed": "its result is wrong, see check"}


def supervise(command: Sequence[str], path: Path, sections: Sequence[str]) -> list[str]:
    """Run a command that runs the cases of sections; start it again after each case that ended its process.

    Returns: the cases that failed, or the last section's name where the process ended outside a case.
    """
    while (code := subprocess.run(command).returncode) != 0:
        report = Report(path)
        running = {name: report.section(name)["running"] for name in sections}
        stopped = [(name, case) for name, case in running.items() if case is not None]
        for name, case in stopped:
            report.end(name, case, {"failed": f"it ended its process, with code {code}"})
            print(f"  FAILED {case}: it ended its process, with code {code}", flush=True)
        if not stopped and code != AGAIN:
            name = sections[-1]
            report.end(name, name, {"failed": f"the process ended with code {code}"})
            break
    report = Report(path)
    return [case for name in sections for case in report.failed(name)]
