"""The run's log: one JSON object a line, and the curves drawn from it."""

import json
from pathlib import Path
from typing import Any

from fastenc._extras import require
from fastenc._files import write_atomically


class Log:
    """Appends lines to ``log.jsonl``; lines after ``step`` are what an interrupted run left and are dropped."""

    def __init__(self, path: Path, step: int = 0):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_log(path) if line["step"] <= step] if step else []
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def write(self, **values: Any) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The log's lines; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def plot_log(path: Path, image: Path, metric: str | None = None) -> None:
    """Training and evaluation loss over steps, and ``metric`` beside them if it is logged, as a PNG."""
    matplotlib = require("matplotlib", extra="train")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_log(path)
    series = lambda key: [(line["step"], line[key]) for line in lines if key in line]
    panels = ["loss"] + (
        [metric] if metric not in (None, "loss") and series(f"eval_{metric}") else []
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 3.5), squeeze=False)
    for axis, name in zip(axes[0], panels, strict=True):
        for key, label in ((name, "training"), (f"eval_{name}", "evaluation")):
            points = series(key)
            if points:
                axis.plot(
                    *zip(*points, strict=True), label=label, marker="." if key != name else None
                )
        axis.set(xlabel="step", ylabel=name)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    write_atomically(image, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
    pyplot.close(figure)
