"""Writes a profile as a table, as JSON and as a picture."""

import json
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

from fastenc._base.extras import require
from fastenc._base.files import write_atomically, write_text_atomically
from fastenc.profiling.profile import Profile, Row

SHOWN = 20
HEADINGS = ("calls", "ms", "share", "GB", "GFLOP", "GB/s", "TFLOP/s", "roofline")
OF_WORK = ("GB", "GFLOP", "GB/s", "TFLOP/s")  # left out on a terminal that is narrower than
WIDE = 120  # characters


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
    write_text_atomically(path, json.dumps(content, indent=1) + "\n")


def table(profile: Profile, width: int | None = None):
    """A table of the ops with the most time, on a GPU with their kernels below. Each has one line.

    Bytes and FLOPs are known for ops only, not for their kernels.

    Args:
        width: characters of the terminal; shapes that do not fit are cut, and a narrow one gets fewer columns. None:
            everything in full.
    """
    made = require("rich.table", extra="train").Table(title="Where a step's time goes")
    narrow = width is not None and width < WIDE
    headings = [heading for heading in HEADINGS if not (narrow and heading in OF_WORK)]
    shown, rest = profile.rows[:SHOWN], profile.rows[SHOWN:]
    lines: list[list[str]] = []
    for row in shown:
        figures = dict(zip(HEADINGS, _figures(row, profile.busy_seconds), strict=True))
        lines.append([_title(row), *(figures[heading] for heading in headings)])
        for kernel, (launches, seconds) in row.kernels.items():
            lines.append([f"  {kernel[:60]}", str(launches), f"{seconds * 1e3:.3f}"])
    if rest:
        calls, seconds = sum(row.calls for row in rest), sum(row.seconds for row in rest)
        share = f"{seconds / profile.busy_seconds:.1%}"
        lines.append([f"{len(rest)} others", str(calls), f"{seconds * 1e3:.3f}", share])
    room = None
    if width is not None:
        columns = zip_longest(headings, *(line[1:] for line in lines), fillvalue="")
        # Each column has a border and two spaces beside its widest cell.
        room = max(width - 4 - sum(3 + max(map(len, column)) for column in columns), 8)
    made.add_column("op", no_wrap=True)
    for heading in headings:
        made.add_column(heading, justify="right", no_wrap=True)
    for name, *cells in lines:
        made.add_row(name if room is None or len(name) <= room else f"{name[: room - 1]}…", *cells)
    return made


def explanation(profile: Profile) -> str:
    """What the column of the roofline means."""
    text = (
        "roofline: the least time that the measured ceilings allow, as a share of the time that was measured. The "
        "ceilings are the bandwidth of a copy in memory and the speed of a large square matrix product."
    )
    if any(row.percent_of_roofline > 100 for row in profile.rows[:SHOWN]):
        text += (
            " More than 100 % is no error: the op's data stayed in a cache, which is faster than memory, or its "
            "product ran faster than the square one."
        )
    return text


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
        str(row.calls),
        f"{row.seconds * 1e3:.3f}",
        f"{row.seconds / busy:.1%}",
        f"{row.bytes / 1e9:.3f}",
        f"{row.flops / 1e9:.2f}" if row.flops else "",
        f"{row.bytes / row.seconds / 1e9:.1f}",
        f"{row.flops / row.seconds / 1e12:.3f}" if row.flops else "",
        f"{row.percent_of_roofline:.0f} %" if row.floor_seconds else "",
    )
