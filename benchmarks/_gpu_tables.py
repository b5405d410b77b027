"""Tables from the results of a visit of a GPU: the sections of gpu_quick.json, and the README's summary."""

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

Rows = dict[str, Any]
GRAPH = "as a CUDA graph"
MODELS = {"bert-base": "BERT-base", "minilm": "MiniLM"}
# Kinds of whole models' results → how a row of the README's table names the work.
MODES = {"inference": "inference", "training": "masked-LM step"}
CORPORA = ("SST-2", "SNLI", "WNUT-17", "Wikipedia", "full 512", "one text of 20 tokens")
# Of the README's cells, in this order: which providers' rows they show.
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


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _time(row: Rows | None) -> str:
    if row is None or "median_ms" not in row:
        return "–"
    return f"{row['median_ms'] * 1e3:,.1f} µs"


def _ops(cases: Rows) -> str:
    def of_direction(row: Rows | None) -> list[str]:
        if row is None or "percent_of_roofline" not in row:
            return [_time(row), "–"]
        return [_time(row), f"{row['floor_ms'] * 1e3:,.1f} µs, {row['percent_of_roofline']:.0f} %"]

    rows = (
        [name, *of_direction(row.get("forward")), *of_direction(row.get("backward"))]
        for name, row in cases.items()
    )
    return _table(["op", "forward", "least, share", "backward", "least, share"], rows)


def _peers(cases: Rows) -> str:
    names = list(
        dict.fromkeys(name for rows in cases.values() for name in rows if name != "failed")
    )
    rows = (
        [case, *(_time(of_case.get(name)) for name in names)] for case, of_case in cases.items()
    )
    return _table(["", *names], rows)


def _steps(cases: Rows, graphs: Rows) -> str:
    def cells(case: str, row: Rows) -> list[str]:
        graph = f"{graphs[case]['ms']:.1f} ms" if "ms" in graphs.get(case, {}) else "–"
        return [case, f"{row['ms']:.1f} ms", f"{row['tokens_per_s'] / 1e3:,.0f} k", graph]

    rows = (cells(case, row) for case, row in cases.items() if "ms" in row)
    return _table(["masked-LM step, AdamW, dropout 0.1", "time", "tokens a second", GRAPH], rows)


def _invariant(cases: Rows) -> str:
    def cells(case: str, row: Rows) -> list[str]:
        same = "yes" if row["batch_invariant"]["same_bits"] else "no"
        plain = "yes" if row["plain"]["same_bits"] else "no"
        times = (row[name]["ms"] for name in ("plain", "batch_invariant"))
        return [case, *(f"{time:.1f} ms" for time in times), f"{row['cost']:.2f}", plain, same]

    rows = (cells(case, row) for case, row in cases.items() if "cost" in row)
    head = [
        "encode",
        "without batch_invariant",
        "with",
        "cost",
        "same bits without",
        "same bits with",
    ]
    return _table(head, rows)


def summary(load: Callable[[Path, str], dict | None], devices: Iterable[Path]) -> str:
    """The README's table of whole models for each GPU: a row for a model and kind of work, a column for a corpus."""
    parts: list[str] = []
    for device in devices:
        if not device.name.startswith("nvidia"):
            continue
        found, machine = {}, None
        for model, mode in product(MODELS, MODES):
            if (data := load(device, f"models_{model}_{mode}")) is not None:
                machine = data["machine"]
                cases = {
                    name.removeprefix(f"{mode}, "): case for name, case in data["cases"].items()
                }
                found[f"{MODELS[model]}, {MODES[mode]}"] = cases
        if (data := load(device, "families")) is not None:
            machine = data["machine"]
            for family, (mode, end) in product(FAMILIES, OF_FAMILIES.items()):
                cases = {
                    corpus: data["cases"].get(f"{family}, {case}{end}", {})
                    for corpus, case in CASES_OF_FAMILIES.items()
                }
                if any(cases.values()):
                    found[f"{FAMILIES[family]}, {mode}"] = cases
        if machine is not None:
            corpora = [name for name in CORPORA if any(cases.get(name) for cases in found.values())]
            rows = (
                [title, *(_speedups(cases.get(name, {})) for name in corpora)]
                for title, cases in found.items()
            )
            parts.append(_table([machine["device"], *corpora], rows))
    return "\n\n".join(parts or ["Not measured yet."]) + "\n"


def _speedups(rows: Rows) -> str:
    """How many times as fast as the baseline each of our ways is: "4.9 / 5.5 / 8.1"."""
    shown = dict.fromkeys(WAYS, "–")
    for provider, row in rows.items():
        way = next((way for way, names in WAYS.items() if provider in names), None)
        if way and "speedup" in row:
            shown[way] = f"{row['speedup']:.1f}"
    return " / ".join(shown.values()) if set(shown.values()) != {"–"} else "–"
