"""What a training run tells its user: a bar or lines on stderr, log.jsonl, the trackers' lines and curves.png."""

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastenc._base.progress import progress_bar
from fastenc.train.log import Log
from fastenc.train.plot import plot_log
from fastenc.train.tracking import start_trackers, stop_trackers

if TYPE_CHECKING:
    from accelerate import Accelerator

# A plot takes half a second, as long as the evaluation of a small model.
SECONDS_BETWEEN_PLOTS = 10.0


class RunReport:
    """The main process reports. In other processes nothing is printed or written.

    Args:
        folder: the run's output folder.
        show_progress: None: a bar if stderr is a terminal, else the lines of the log. False: neither.
    """

    def __init__(self, accelerator: "Accelerator", folder: Path, show_progress: bool | None):
        self.accelerator, self.folder, self.show_progress = accelerator, folder, show_progress
        self.is_main = accelerator.is_main_process
        self.total_steps = 0

    def open(self, step: int, settings: Mapping[str, object]) -> None:
        """Open the log and the trackers of a run that continues after ``step``."""
        if self.is_main:
            self.log = Log(self.folder / "log.jsonl", step)
        start_trackers(self.accelerator, self.folder, step, settings)

    def close(self) -> None:
        stop_trackers(self.accelerator)

    def bar(self, steps: Iterable[Any], first: int, total: int) -> Any:
        """The remaining steps of ``total``, with a bar if there is one."""
        shown = self.show_progress if self.is_main else False
        bar = progress_bar(steps, "training", "step", shown, initial=first, total=total)
        self._bar = bar if hasattr(bar, "set_postfix") else None
        self._prints_lines = self.show_progress is None and self._bar is None
        self._plotted = time.monotonic()
        self.total_steps = total
        return bar

    def show(self, values: Mapping[str, float]) -> None:
        """Show values in the bar."""
        if self._bar is not None:
            self._bar.set_postfix({name: _short(value) for name, value in values.items()})

    def print(self, text: str) -> None:
        """Print a text on stderr."""
        if self.is_main and self.show_progress is not False:
            print(text, file=sys.stderr, flush=True)

    def write(self, step: int, note: str = "", **values: float) -> None:
        """Write a line to the log, to the trackers and, if there is no bar, with ``note`` to stderr."""
        if not self.is_main:
            return
        self.log.write(step=step, **values)
        self.accelerator.log(values, step=step)
        if self._prints_lines:
            shown = {name: value for name, value in values.items() if name != "steps_per_day"}
            words = [f"step {step:,} of {self.total_steps:,}"]
            words += [f"{name} {_short(value)}" for name, value in shown.items()]
            self.print("  ".join(filter(None, [*words, note])))

    def plot(self, **about: Any) -> None:
        """Write curves.png. ``about``: arguments of :func:`plot_log`."""
        if self.is_main:
            plot_log(self.log.path, self.folder / "curves.png", **about)
            self._plotted = time.monotonic()

    def plot_if_due(self, **about: Any) -> None:
        """Write curves.png if the last one is old."""
        if time.monotonic() - self._plotted > SECONDS_BETWEEN_PLOTS:
            self.plot(**about)


def duration(seconds: float) -> str:
    """A time such as 3h20m, 5m10s or 12s."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
