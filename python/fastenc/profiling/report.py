"""Writes a profile as a table, as JSON and as a picture."""

import json
from dataclasses import asdict
from pathlib import Path

from fastenc._extras import require
from fastenc._files import write_atomically
from fastenc.profiling.profile import Profile, Row

SHOWN = 20


def write_json(profile: Profile, path: Path) -> None:
    """Write all rows and the device's measured peak rates as JSON."""
    content = {
        "step_ms": profile.step_seconds * 1e3,
        "busy_ms": profile.busy_seconds * 1e3,
        "peak_MB": None if profile.peak_bytes is None else profile.peak_bytes / 2**20,
        "ceilings": profile.ceilings,
        "rows": [
            asdict(row) | {"percent_of_roofline": row.percent_of_roofline} for row in profile.rows
        ],
    }
    write_atomically(path, lambda file: file.write_text(json.dumps(content, indent=1) + "\n"))


def table(profile: Profile):
    """A table of the ops with the most time, on a GPU with their kernels below.

    Bytes and FLOPs are known for ops only, not for their kernels.
    """
    made = require("rich.table", extra="train").Table(title="Where a step's time goes")
    for heading in ("op", "calls", "ms", "share", "GB", "GFLOP", "GB/s", "TFLOP/s", "roofline"):
        if heading == "op":  # the column that is wrapped on a narrow terminal
            made.add_column(heading, overflow="fold", min_width=24)
        else:
            made.add_column(heading, justify="right", no_wrap=True)
    for row in profile.rows[:SHOWN]:
        made.add_row(_title(row), str(row.calls), *_figures(row, profile.busy_seconds))
        for kernel, (launches, seconds) in row.kernels.items():
            made.add_row(f"  {kernel[:60]}", str(launches), f"{seconds * 1e3:.3f}")
    rest = profile.rows[SHOWN:]
    if rest:
        calls, seconds = sum(row.calls for row in rest), sum(row.seconds for row in rest)
        share = f"{seconds / profile.busy_seconds:.1%}"
        made.add_row(f"{len(rest)} others", str(calls), f"{seconds * 1e3:.3f}", share)
    return made


def summary(profile: Profile) -> str:
    """One line: the time of the step, the time of its ops, and the least time that the roofline allows."""
    floor = sum(row.floor_seconds for row in profile.rows)
    parts = [
        f"step {profile.step_seconds * 1e3:.3f} ms",
        f"ops {profile.busy_seconds * 1e3:.3f} ms",
        f"ceilings allow {floor * 1e3:.3f} ms",
    ]
    if profile.peak_bytes is not None:
        parts.append(f"peak memory {profile.peak_bytes / 2**20:.0f} MB")
    return ", ".join(parts)


def draw(profile: Profile, path: Path, title: str) -> None:
    """Write a bar chart of the ops with the most time: the measured time, and the least that the roofline allows."""
    matplotlib = require("matplotlib", extra="plots")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", extra="plots")
    rows = profile.rows[:SHOWN][::-1]
    figure, axis = pyplot.subplots(figsize=(10, 1 + 0.35 * len(rows)))
    names = [f"{number}" for number in range(len(rows))]
    axis.barh(names, [row.seconds * 1e3 for row in rows], color="#c9d4e3", label="measured")
    floors = [min(row.floor_seconds, row.seconds) * 1e3 for row in rows]
    axis.barh(names, floors, color="#2f6db5", label="allowed by the ceilings")
    axis.set_yticks(range(len(rows)), [_title(row) for row in rows], fontsize=7)
    for number, row in enumerate(rows):
        text = f" {row.percent_of_roofline:.0f} %" if row.floor_seconds else ""
        axis.text(row.seconds * 1e3, number, text, va="center", fontsize=7)
    axis.set(xlabel="ms a step", title=title)
    axis.legend(loc="lower right")
    figure.tight_layout()
    write_atomically(path, lambda file: figure.savefig(file, dpi=120, format="png"))
    pyplot.close(figure)


def _title(row: Row) -> str:
    return f"{row.op.removeprefix('aten::')} {row.shapes}".strip()


def _figures(row: Row, busy: float) -> tuple[str, ...]:
    return (
        f"{row.seconds * 1e3:.3f}",
        f"{row.seconds / busy:.1%}",
        f"{row.bytes / 1e9:.3f}",
        f"{row.flops / 1e9:.2f}" if row.flops else "",
        f"{row.bytes / row.seconds / 1e9:.1f}",
        f"{row.flops / row.seconds / 1e12:.3f}" if row.flops else "",
        f"{row.percent_of_roofline:.0f} %" if row.floor_seconds else "",
    )
