"""What every benchmark shares: correctness first, alternating runs, medians, the roofline of the same run, JSON.

A provider whose result is wrong is reported as wrong and gets no time. One that is not installed or refuses the case is
reported with the reason. The providers' runs alternate in one process, so that a drift of the machine's speed affects
all of them alike; quote the ratios. On a GPU an op's time is that of its kernels from a cold cache (KernelTimer), and a
model's time lasts from the call to the end of its work. Results are written after every group of cases.
"""

import hashlib
import importlib
import json
import math
import os
import platform
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timezone
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fastenc.kernels import launch
from torch import Tensor

from fastenc._base.files import write_atomically
from fastenc.ops import library
from fastenc.profiling import Ceilings, Work
from fastenc.profiling.timing import KernelTimer, call_seconds, synchronize

RESULTS = Path(os.environ.get("FASTENC_RESULTS", Path(__file__).parent / "results"))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
TURN, PAUSE = 0.05, 0.02  # seconds
# benchmarks/gpu_parts.sh sets these: the time (seconds since 1970) at which it ends the stage, and whether to keep the
# results of an earlier, unfinished call of the stage.
END = float(os.environ.get("FASTENC_BENCH_END", "inf"))
GO_ON = "FASTENC_BENCH_GO_ON" in os.environ
LEAST_LEFT = 30  # no group begins in the last seconds before END
UNFINISHED = 75  # exit code, EX_TEMPFAIL of sysexits.h
LIBRARIES = (
    "fastenc",
    "torch",
    "triton",
    "transformers",
    "liger-kernel",
    "cut-cross-entropy",
    "onnxruntime",
    "openvino",
    "nncf",
    "numpy",
)
NOT_INSTALLED = "not installed"
# Largest ||result - truth|| / ||truth||. A wrong formula is far above, the rounding of a few operations below.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def machine() -> dict:
    """The device and the versions with which the figures were measured."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name() if ON_GPU else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "int8_products": library._C.build_info()["int8_products"] if library.HAS_CPP else None,
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    if limit := os.environ.get("FASTENC_ISA"):  # it stands for another processor
        return f"{_processor_name()} as {limit}"
    # Processors with and without AMX can have the same name, but compute bfloat16 at different speeds.
    return _processor_name() + (" with AMX" if torch.cpu._is_amx_tile_supported() else "")


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    values = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    name = values.get("model name") or platform.processor() or "unknown processor"
    # Generations of AMD's server processors can have the same name, too. Zen 3 and Zen 4 share a family.
    has_avx512 = "avx512f" in values.get("flags", "").split()
    generations = {("25", False): "Zen 3", ("25", True): "Zen 4", ("26", True): "Zen 5"}
    generation = generations.get((values.get("cpu family", ""), has_avx512))
    return f"{name} ({generation})" if generation and name.startswith("AMD") else name


def folder_of_device() -> str:
    """The folder below benchmarks/results/ for this kind of device: nvidia-h200, amd-epyc-2-cores."""
    if ON_GPU:
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)|processor|cpu", "", _processor().lower()))
    return "-".join([*words, str(os.cpu_count()), "cores"])


@cache
def ceilings() -> Ceilings:
    """The ceilings of this process's device; each is measured when a figure first needs it."""
    return Ceilings(DEVICE)


@cache
def _kernel_timer() -> KernelTimer:
    return KernelTimer(DEVICE)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def peer(module: str, make: Callable[[Any], Any]) -> Any:
    """``make(module)``, or the reason why this provider is missing."""
    try:
        return make(importlib.import_module(module))
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]
        return NOT_INSTALLED if missing else f"{type(error).__name__}: {error}"


def compiled(function: Callable, mode: str | None = None) -> Callable:
    """torch.compile for one case. Graphs of other cases are forgotten: after some recompilations it would give up."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False, mode=mode)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Inside, the environment variable has this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Prepared(NamedTuple):
    """A call with a preparation that is not timed; on a GPU only."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]

    def __call__(self):
        return self.run(self.prepare())


def compare(
    providers: dict[str, Callable[[], object] | str],
    *,
    baseline: str,
    check: Callable[[str, Any], str | None] | None = None,
    work: Work | None = None,
    end_to_end: bool = False,
    seconds: float | None = None,
    min_rounds: int = 5,
) -> dict:
    """Time the providers by turns.

    A turn starts after a pause, in which the threads of other providers stop spinning. A short call is repeated for
    ``TURN`` seconds, and the mean counts; on a CPU without the first call.

    Args:
        providers: a call, or the reason why there is none.
        baseline: the provider whose time the speedups are relative to.
        check: called with a provider's name and its result; returns what is wrong, or None.
        work: the least bytes and FLOPs of a call, for rates and the share of the roofline.
        end_to_end: on a GPU, count the host's time too, and do not empty the cache.
        seconds: about how long the timing of all providers takes together; None: 4, on a GPU 1.
    Returns: {provider: {"median_ms", "p20_ms", "p80_ms", "rounds", "speedup", ...}}, or {"wrong": what},
        {"missing": why}, {"failed": error}.
    """
    results: dict[str, dict] = {}
    alive, turns = {}, {}
    for name, provider in providers.items():
        if isinstance(provider, str):
            results[name] = {"missing": provider}
            continue
        try:
            results[name], turns[name] = _first_calls(name, provider, check, end_to_end)
        except Exception as error:  # a peer that refuses a case must not end the run
            reason = (str(error).strip() or "no message").splitlines()[0][:150]
            results[name] = {"failed": f"{type(error).__name__}: {reason}"}
            if ON_GPU:
                torch.cuda.empty_cache()  # the call may have failed for lack of memory
            continue
        if "wrong" not in results[name]:
            alive[name] = provider
    times: dict[str, list[float]] = {name: [] for name in alive}
    end = time.perf_counter() + (seconds if seconds is not None else 1.0 if ON_GPU else 4.0)
    rounds = 0
    while alive and (rounds < min_rounds or (time.perf_counter() < end and rounds < 1000)):
        for name in alive:
            time.sleep(PAUSE)
            times[name] += turns[name]()
        rounds += 1
    for name, values in times.items():
        values.sort()
        results[name] |= {
            "median_ms": statistics.median(values) * 1e3,
            "p20_ms": values[len(values) // 5] * 1e3,
            "p80_ms": values[-1 - len(values) // 5] * 1e3,
            "rounds": rounds,
        }
    for row in results.values():
        if "median_ms" in row:
            if baseline in times:
                row["speedup"] = results[baseline]["median_ms"] / row["median_ms"]
            if work is not None:
                row |= rates(work, row["median_ms"] / 1e3)
    return results


def rates(work: Work, seconds: float) -> dict[str, float]:
    """The rates that a time means, and their share of this run's ceilings."""
    floor = ceilings().floor(work)
    figures = {
        "bytes": work.bytes,
        "GB_per_s": work.bytes / seconds / 1e9,
        "floor_ms": floor * 1e3,
        "percent_of_roofline": 100 * floor / seconds,
    }
    if work.flops:
        figures |= {"flops": work.flops, "TFLOP_per_s": work.flops / seconds / 1e12}
    return figures


def _first_calls(name: str, provider: Callable, check, end_to_end: bool):
    """A row with the peak memory, or with what is wrong; and the provider's turn."""
    row: dict[str, Any] = {}
    provider()  # compiles, and fills the provider's caches
    before = _start_of_peak()
    result = provider()
    synchronize(DEVICE)
    if ON_GPU:
        row["peak_MB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    problem = check(name, result) if check else None
    del result
    if problem:
        return {"wrong": problem}, None
    start = time.perf_counter()
    provider()
    host = time.perf_counter() - start
    synchronize(DEVICE)
    repeats = math.ceil(TURN / (time.perf_counter() - start))
    if not ON_GPU:
        return row, lambda: _cpu_turn(provider, repeats)
    if end_to_end:
        return row, lambda: call_seconds(provider, DEVICE, repeats)
    prepare, timed = provider if isinstance(provider, Prepared) else (None, provider)
    return row, lambda: _kernel_timer().seconds(timed, min(repeats, 50), host, prepare)


def _start_of_peak() -> int:
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _cpu_turn(provider: Callable, repeats: int) -> list[float]:
    if repeats > 1:
        provider()
    start = time.perf_counter()
    for _ in range(repeats):
        provider()
    return [(time.perf_counter() - start) / repeats]


class Provider(NamedTuple):
    """An op as a library offers it: a call with gradients, and the change of its layout to the truth's."""

    forward: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    dout: Tensor
    to_truth: Callable[[Tensor], Tensor] = lambda tensor: tensor


def compare_op(
    name: str,
    providers: dict[str, Provider | str],
    truth: Provider,
    *,
    baseline: str,
    forward: Work,
    backward: Work,
    checked: bool = True,
) -> dict[str, dict]:
    """Cases "name, forward", on a GPU also "name, backward", and "name, forward + backward".

    Args:
        truth: the same op in float64; returns the gradients of its own inputs, in the providers' order.
        forward, backward: the least work of each direction.
        checked: False for an op with random results, which only have to be finite.
    """
    exact_out = truth.forward()
    exact = (exact_out.detach(), *torch.autograd.grad(exact_out, truth.inputs, truth.dout))
    tolerance = TOLERANCES[forward.dtype]

    def check(provider: str, result) -> str | None:
        convert = providers[provider].to_truth
        results = (result,) if isinstance(result, Tensor) else result
        against = exact[:1] if isinstance(result, Tensor) else exact[1:]
        for index, (value, true) in enumerate(zip(results, against, strict=True)):
            value = convert(value).double()
            error = ((value - true).norm() / true.norm()).item() if checked else value.sum().item()
            if not (error < tolerance if checked else math.isfinite(error)):
                what = "result" if isinstance(result, Tensor) else f"gradient {index}"
                return f"{what}: relative error {error:.2g}" if checked else f"{what}: not finite"
        return None

    def both(provider: Provider):
        return torch.autograd.grad(provider.forward(), provider.inputs, provider.dout)

    def backward_alone(provider: Provider):
        return Prepared(
            provider.forward, lambda out: torch.autograd.grad(out, provider.inputs, provider.dout)
        )

    directions = {"forward": (lambda p: p.forward, forward)}
    if ON_GPU:
        directions["backward"] = (backward_alone, backward)
    directions["forward + backward"] = (lambda p: lambda: both(p), forward + backward)
    cases = {}
    for direction, (make, work) in directions.items():
        calls = {n: p if isinstance(p, str) else make(p) for n, p in providers.items()}
        with torch.no_grad() if direction == "forward" else nullcontext():
            cases[f"{name}, {direction}"] = compare(
                calls, baseline=baseline, check=check, work=work
            )
    return cases


def compare_functions(
    name: str,
    functions: dict[str, Callable[..., Tensor] | str],
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    *,
    baseline: str = "eager",
    forward: Work,
    backward: Work,
    checked: bool = True,
) -> dict[str, dict]:
    """:func:`compare_op` for functions with the same inputs; the truth is the baseline in float64."""
    wide = tuple(value.detach().double().requires_grad_() for value in inputs)
    providers = {
        key: f if isinstance(f, str) else Provider(lambda f=f: f(*inputs), inputs, dout)
        for key, f in functions.items()
    }
    truth = Provider(lambda: functions[baseline](*wide), wide, dout.double())
    works = {"forward": forward, "backward": backward}
    return compare_op(name, providers, truth, baseline=baseline, checked=checked, **works)


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
    text = json.dumps(content, indent=1) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))
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
