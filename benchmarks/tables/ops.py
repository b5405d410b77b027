"""Sections of the ops' benchmarks: a row for each case, a column for each provider."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from benchmarks.tables import gpu
from benchmarks.tables.cells import grid, providers_of, time_and_roofline, time_and_speedup
from benchmarks.tables.markdown import row, section, table

BENCHMARKS = Path(__file__).parents[1]


def declared_sections() -> dict[str, Callable[[dict], str]]:
    """The sections that the ops' benchmarks declare as TABLES = {name of the results: title}."""
    sections = {}
    for path in sorted(BENCHMARKS.glob("bench_*.py")):
        module = import_module(f"benchmarks.{path.stem}")
        for name, title in getattr(module, "TABLES", {}).items():
            sections[name] = ops(
                title, path.stem.removeprefix("bench_"), getattr(module, "NOTE", "")
            )
    return sections


def ops(title: str, name: str, about: str = "") -> Callable[[dict], str]:
    """The section of ``python -m benchmarks.run NAME``, a benchmark with many cases."""

    def make(data: dict) -> str:
        cases = data["cases"]
        providers = providers_of(list(cases.values()))
        lines = (
            row([case, *(time_and_roofline(rows.get(provider)) for provider in providers)])
            for case, rows in cases.items()
        )
        text = f"{about} {_ceilings(data)}".strip()
        command = f"python -m benchmarks.run {name}"
        return section(data, title, command, text, table(f"| {row(providers)}", lines))

    return make


def _ceilings(data: dict) -> str:
    """The ceilings by which the shares of the roofline divide; empty for results without them."""
    ceilings = data.get("ceilings", {})
    if "copy_GB_per_s" not in ceilings:
        return ""
    rates = ceilings.get("product_TFLOP_per_s", {})
    products = "".join(f", {dtype} product {rate:.3g} TFLOP/s" for dtype, rate in rates.items())
    return f"Last figure: share of the roofline (copy {ceilings['copy_GB_per_s']:,.0f} GB/s{products})."


def masked_cross_entropy(data: dict) -> str:
    cases = data["cases"]
    if "memory, float32" not in cases:
        return ops(
            "Masked cross-entropy, 15 % labelled, loss and gradient", "masked_cross_entropy"
        )(data)
    timed = {case: case for case in cases if not case.startswith("memory")}
    memory = cases["memory, float32"]
    peaks = ", ".join(
        f"{name} {row['peak_MB_above_inputs']:.0f} MB"
        for name, row in memory.items()
        if isinstance(row, dict)
    )
    gradient = memory["gradient of the labelled rows, MB"]
    return section(
        data,
        "Masked cross-entropy: 2,048 × 30,522, 15 % labelled, loss and gradient",
        "python -m benchmarks.run masked_cross_entropy",
        f"Peak memory above the inputs, float32: {peaks}; the labelled rows' gradient itself is {gradient:.0f} MB.",
        grid(cases, timed, "time, speed-up", time_and_speedup),
    )


def gpu_quick(data: dict) -> str:
    return section(
        data,
        "Kernels and training steps",
        "python -m benchmarks.gpu_quick check time step graphs peers invariant",
        "bfloat16, 16,384 tokens, width 768, 12 heads of 64. An op's time is that of its kernels from a cold cache. "
        "The least is what its bytes, or its FLOPs, take at the rates of a large copy or product in the same run.",
        gpu.quick(data),
    )
