"""Tables of GPUs: the sections of gpu_quick.json, and the README's table of whole models."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from benchmarks.tables.cells import NOTHING, providers_of
from benchmarks.tables.markdown import row as line
from benchmarks.tables.markdown import table
from benchmarks.tables.results import devices, load

Rows = dict[str, Any]
GRAPH = "as a CUDA graph"
MODELS = {"bert-base": "BERT-base", "minilm": "MiniLM"}
# {mode of a whole model's results: how a row of the README's table names the work}
MODES = {"inference": "inference", "training": "masked-LM step"}
CORPORA = ("SST-2", "SNLI", "WNUT-17", "Wikipedia", "full 512", "one text of 20 tokens")
# What a cell of the README's table shows, in this order: {way: names of its providers}
WAYS = {
    "patched": ("fastenc.patch", "Hugging Face, patched by fastenc"),
    "own": ("fastenc",),
    GRAPH: ("fastenc.compile_training", "fastenc.compile_inference"),
}
FAMILIES = {"deberta-v3": "DeBERTa-v3-base", "modernbert": "ModernBERT-base"}
OF_FAMILIES = {"inference": "", "forward and backward": ", training step"}
CASES_OF_FAMILIES = {"SST-2": "lengths of SST-2", "full 512": "16 texts of 512"}


def quick(data: dict) -> str:
    """The sections of gpu_quick.json as tables."""
    parts = [
        _if_any("check", data, _checked),
        _if_any("time", data, _ops),
        _if_any("peers", data, _peers),
        _if_any("step", data, lambda cases: _steps(cases, data.get("graphs", {}).get("cases", {}))),
        _if_any("invariant", data, _invariant),
    ]
    return "\n\n".join(part for part in parts if part)


def _if_any(section: str, data: dict, table: Callable[[Rows], str]) -> str:
    content = data.get(section, {})
    shown = table(content["cases"]) if content.get("cases") else ""
    return f"{shown}\n\n{content['note']}" if "note" in content else shown


def _checked(cases: Rows) -> str:
    right = sum(row.get("right") is True for row in cases.values())
    worst = max(max(row["relative errors"]) for row in cases.values() if "relative errors" in row)
    return (
        f"Of {len(cases)} cases, dropout included, the results and gradients of {right} are right: at most {worst:.1e} "
        "from those in float64, relative to their norm, and at most a tenth in any row."
    )


def _time(row: Rows | None) -> str:
    if row is None or "median_ms" not in row:
        return NOTHING
    return f"{row['median_ms'] * 1e3:,.1f} µs"


def _ops(cases: Rows) -> str:
    def of_direction(row: Rows | None) -> list[str]:
        if row is None or "percent_of_roofline" not in row:
            return [_time(row), NOTHING]
        return [_time(row), f"{row['floor_ms'] * 1e3:,.1f} µs, {row['percent_of_roofline']:.0f} %"]

    lines = (
        line([name, *of_direction(row.get("forward")), *of_direction(row.get("backward"))])
        for name, row in cases.items()
    )
    return table("| op | forward | least, share | backward | least, share |", lines)


def _peers(cases: Rows) -> str:
    names = [name for name in providers_of(list(cases.values())) if name != "failed"]
    lines = (
        line([case, *(_time(of_case.get(name)) for name in names)])
        for case, of_case in cases.items()
    )
    return table(line(["", *names]), lines)


def _steps(cases: Rows, graphs: Rows) -> str:
    def of_case(case: str, row: Rows) -> str:
        graph = f"{graphs[case]['ms']:.1f} ms" if "ms" in graphs.get(case, {}) else NOTHING
        return line([case, f"{row['ms']:.1f} ms", f"{row['tokens_per_s'] / 1e3:,.0f} k", graph])

    lines = (of_case(case, row) for case, row in cases.items() if "ms" in row)
    return table(
        f"| masked-LM step, AdamW, dropout 0.1 | time | tokens a second | {GRAPH} |", lines
    )


def _invariant(cases: Rows) -> str:
    def of_case(case: str, row: Rows) -> str:
        times = (f"{row[way]['ms']:.1f} ms" for way in ("plain", "batch_invariant"))
        same = ("yes" if row[way]["same_bits"] else "no" for way in ("plain", "batch_invariant"))
        return line([case, *times, f"{row['cost']:.2f}", *same])

    lines = (of_case(case, row) for case, row in cases.items() if "cost" in row)
    return table(
        "| encode | without batch_invariant | with | cost | same bits without | same bits with |",
        lines,
    )


def summary() -> str:
    """The README's table of whole models for each GPU: a row for a model and its work, a column for a corpus."""
    parts = [_of_gpu(device) for device in devices() if device.startswith("nvidia")]
    return "\n\n".join(filter(None, parts)) + "\n" if any(parts) else "Not measured yet.\n"


def _of_gpu(device: str) -> str:
    measured = [*_whole_models(device), *_families(device)]
    if not measured:
        return ""
    corpora = [name for name in CORPORA if any(cases.get(name) for _, _, cases in measured)]
    lines = (
        line([title, *(_speedups(cases.get(name, {})) for name in corpora)])
        for _, title, cases in measured
    )
    name = measured[0][0]["device"]
    return table(line([name, *corpora]), lines)


def _whole_models(device: str) -> Iterator[tuple[Rows, str, Rows]]:
    """(machine, title, {corpus: rows}) for each model and its work."""
    for model, mode in product(MODELS, MODES):
        if (data := load(device, f"models_{model}_{mode}")) is not None:
            cases = {name.removeprefix(f"{mode}, "): rows for name, rows in data["cases"].items()}
            yield data["machine"], f"{MODELS[model]}, {MODES[mode]}", cases


def _families(device: str) -> Iterator[tuple[Rows, str, Rows]]:
    """As :func:`_whole_models`, from the benchmark of families."""
    data = load(device, "families")
    if data is None:
        return
    for family, (mode, end) in product(FAMILIES, OF_FAMILIES.items()):
        cases = {
            corpus: data["cases"].get(f"{family}, {case}{end}", {})
            for corpus, case in CASES_OF_FAMILIES.items()
        }
        if any(cases.values()):
            yield data["machine"], f"{FAMILIES[family]}, {mode}", cases


def _speedups(rows: Rows) -> str:
    """How many times as fast as the baseline each of our ways is: "4.9 / 5.5 / 8.1"."""
    shown = dict.fromkeys(WAYS, NOTHING)
    for provider, row in rows.items():
        way = next((way for way, names in WAYS.items() if provider in names), None)
        if way and "speedup" in row:
            shown[way] = f"{row['speedup']:.1f}"
    return " / ".join(shown.values()) if set(shown.values()) != {NOTHING} else NOTHING
