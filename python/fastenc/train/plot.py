"""Plots a run's losses, metric and learning rate from its log."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastenc._base.extras import require
from fastenc._base.files import write_atomically
from fastenc.train.log import read_log

LABELS = {"loss": "loss (mean over items)", "learning_rate": "learning rate"}


def plot_log(
    path: Path,
    image: Path,
    metric: str | None = None,
    *,
    best: int | None = None,
    title: str = "",
) -> None:
    """Write a PNG with the training and evaluation loss, ``metric`` if it is logged, and the learning rate over steps.

    Without matplotlib, which training does not need, no file is written.

    Args:
        best: step of the best checkpoint, which is marked in every panel.
        title: the run and its data.
    """
    if find_spec("matplotlib") is None:
        return
    lines = read_log(path)
    panels = ["loss", "learning_rate"]
    if metric not in (None, "loss") and _series(lines, f"eval_{metric}"):
        panels.insert(1, str(metric))
    # pyplot is not used, because it would change the user's backend and current figure.
    figure_class = require("matplotlib.figure", extra="plots").Figure
    figure = figure_class(figsize=(4.2 * len(panels), 3.6), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, sharex=True)
    for axis, name in zip(grid[0], panels, strict=True):
        for key, label, look in ((name, "training", "C0-"), (f"eval_{name}", "evaluation", "C1o-")):
            if points := _series(lines, key):
                axis.plot(*zip(*points, strict=True), look, label=label, markersize=4)
        if best is not None:
            axis.axvline(
                best, color="0.4", linestyle="--", linewidth=1, label=f"best: step {best:,}"
            )
        axis.set(xlabel="optimiser steps", ylabel=LABELS.get(name, name))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.ticklabel_format(axis="y", scilimits=(-3, 4))
        axis.grid(alpha=0.3)
        explained = name != "learning_rate" or best is not None
        if explained and axis.get_legend_handles_labels()[0]:  # a short run may have no point yet
            axis.legend()
    figure.suptitle(title, fontsize=10)
    write_atomically(image, lambda temporary: figure.savefig(temporary, format="png", dpi=120))


def _series(lines: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(line["step"], line[key]) for line in lines if key in line]
