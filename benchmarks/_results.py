"""A benchmark's groups of cases, measured one after another, and its results as JSON, written after each group."""

import hashlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastenc.kernels import launch

from benchmarks._device import DEVICE, ceilings, folder_of_device, machine
from fastenc._base.files import write_text_atomically

RESULTS = Path(os.environ.get("FASTENC_RESULTS", Path(__file__).parent / "results"))
# benchmarks/gpu_parts.sh sets these: the time (seconds since 1970) at which it ends the stage, and whether to keep the
# results of an earlier, unfinished call of the stage.
END = float(os.environ.get("FASTENC_BENCH_END", "inf"))
GO_ON = "FASTENC_BENCH_GO_ON" in os.environ
LEAST_LEFT = 30  # no group begins in the last seconds before END
UNFINISHED = 75  # exit code, EX_TEMPFAIL of sysexits.h


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _path(name: str) -> Path:
    return RESULTS / folder_of_device() / f"{name}.json"


def read_cases(name: str) -> dict:
    """The cases in this device's results so far; {} without any."""
    path = _path(name)
    return json.loads(path.read_text())["cases"] if path.exists() else {}


def write(name: str, cases: dict) -> Path:
    """Write a benchmark's cases as JSON with machine, versions and ceilings, and print them as a table.

    Exits with an error if a row of fastenc itself is wrong or failed.
    """
    path = _save(name, {"machine": machine(), "ceilings": ceilings().as_json(), "cases": cases})
    print(f"\n{name} ({path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path})")
    _print(cases)
    exit_if_broken([f"{name}: {row}" for row in _broken(cases)])
    return path


Groups = dict[str, Callable[[], dict[str, dict]]]  # each call measures a group of cases


def run_groups(name: str, groups: Groups) -> None:
    """:func:`measure_groups`; exits with an error when anything is broken."""
    broken: list[str] = []
    measure_groups(name, groups, broken)
    exit_if_broken(broken)


def run_shapes(op: str, measure: Callable[..., dict], shapes: dict[str, tuple]) -> None:
    """``run_groups`` over measure(name, *shape, dtype) in float32 and bfloat16."""
    groups = {}
    for shape, arguments in shapes.items():
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{shape}, {dtype_name(dtype)}"
            groups[name] = partial(measure, name, *arguments, dtype)
    run_groups(op, groups)


def measure_groups(name: str, groups: Groups, broken: list[str]) -> None:
    """Measure one group of cases after another; write the results and print the cases after each.

    A group that raises does not stop the next. With GO_ON, a group is left out if the results already hold it, correct
    and measured with the same table of launch parameters; groups that went wrong come last. If the next group would not
    end before END, the program exits: with an error if anything is broken, else with UNFINISHED.

    Args:
        broken: gets the errors, and the rows of fastenc itself that are wrong or failed.
    """
    content = _begun(name) if GO_ON else _nothing_yet()
    if math.inf > END:
        # A stage that ends in its first group must not leave older results as its own.
        _save(name, content)
    longest = float(LEAST_LEFT)
    left = [group for group in groups if group not in content["measured"]]
    for group in sorted(left, key=content["failed"].__contains__):
        start = time.time()
        if start + longest > END:
            print(f"{name}: the time is up; the next run goes on at {group}")
            exit_if_broken(broken)
            raise SystemExit(UNFINISHED)
        try:
            cases = groups[group]()
        except Exception as error:
            traceback.print_exc()
            cases, wrong = {}, [f"{group}: {type(error).__name__}"]
        else:
            wrong = _broken(cases)
        longest = max(longest, 1.5 * (time.time() - start))
        broken += [f"{name}: {row}" for row in wrong]
        content["cases"] |= cases
        content["failed" if wrong else "measured"].append(group)
        content["machine"] = machine()
        content["ceilings"] = _joined(content["ceilings"], ceilings().as_json())
        _save(name, content)
        print(f"\n{name}")
        _print(cases)


def _nothing_yet() -> dict[str, Any]:
    state: dict[str, Any] = {"tables": _digest_of_table(), "measured": [], "failed": []}
    return state | {"ceilings": {}, "cases": {}}


def _begun(name: str) -> dict[str, Any]:
    """The results of an unfinished run, if they were measured with the present table of launch parameters."""
    fresh, path = _nothing_yet(), _path(name)
    content = json.loads(path.read_text()) if path.exists() else {}
    usable = "measured" in content and content["tables"] == fresh["tables"]
    return content if usable else fresh


def _digest_of_table() -> str | None:
    """Digest of this device's table of launch parameters; None without one."""
    path = launch.TABLES / f"{launch.architecture(DEVICE)}.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _joined(before: dict, now: dict) -> dict:
    """The ceilings of two processes; of a ceiling that both have, the later figure."""
    rates = before.get("product_TFLOP_per_s", {}) | now.get("product_TFLOP_per_s", {})
    return before | now | ({"product_TFLOP_per_s": rates} if rates else {})


def _save(name: str, content: dict) -> Path:
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, json.dumps(content, indent=1) + "\n")
    return path


def _print(cases: dict) -> None:
    for case, rows in cases.items():
        print(f"  {case}")
        for provider, row in rows.items():
            shown = _line(row) if isinstance(row, dict) else f"{row:10.1f}"
            print(f"    {provider:34} {shown}")
    sys.stdout.flush()


def _broken(cases: dict) -> list[str]:
    """The rows of fastenc itself that are wrong or failed."""
    return [
        f"{case}: {provider}"
        for case, rows in cases.items()
        for provider, row in rows.items()
        if provider.startswith("fastenc")
        and isinstance(row, dict)
        and row.keys() & {"wrong", "failed"}
    ]


def exit_if_broken(broken: list[str]) -> None:
    if broken:
        raise SystemExit(f"wrong or failed: {'; '.join(broken)}")


def _line(row: dict) -> str:
    for state in ("wrong", "missing", "failed"):
        if state in row:
            return f"{state}: {row[state]}"
    if "median_ms" not in row:
        return str(row)
    columns = [f"{row['median_ms']:10.3f} ms [{row['p20_ms']:.3f}, {row['p80_ms']:.3f}]"]
    if "speedup" in row:
        columns.append(f"{row['speedup']:6.2f}x")
    if "percent_of_roofline" in row:
        columns.append(f"{row['percent_of_roofline']:5.1f} % of roofline")
    if row.get("peak_MB"):
        columns.append(f"{row['peak_MB']:.0f} MB")
    return "  ".join(columns)
