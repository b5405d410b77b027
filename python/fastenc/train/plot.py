"""Plots a run's losses and metric from its log."""

from importlib.util import find_spec
from pathlib import Path

from fastenc._extras import require
from fastenc._files import write_atomically
from fastenc.train.log import read_log


def plot_log(path: Path, image: Path, metric: str | None = None) -> None:
    """Write a PNG with training and evaluation loss over steps, and with ``metric`` if it is logged.

    Without matplotlib, which training does not need, no file is written.
    """
    if find_spec("matplotlib") is None:
        return
    # pyplot is not used, because it would change the user's backend and current figure.
    figure_class = require("matplotlib.figure", extra="plots").Figure
    lines = read_log(path)
    series = lambda key: [(line["step"], line[key]) for line in lines if key in line]
    panels = ["loss"]
    if metric not in (None, "loss") and series(f"eval_{metric}"):
        panels.append(metric)
    figure = figure_class(figsize=(5 * len(panels), 3.5), layout="tight")
    for axis, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for key, label, marker in ((name, "training", ""), (f"eval_{name}", "evaluation", ".")):
            if points := series(key):
                axis.plot(*zip(*points, strict=True), label=label, marker=marker)
                axis.legend()
        axis.set(xlabel="step", ylabel=name)
        axis.grid(alpha=0.3)
    write_atomically(image, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
