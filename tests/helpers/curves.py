"""Whether the runs of tests draw their curves."""

from contextlib import contextmanager

from fastenc.train import run_report
from fastenc.train.plot import plot_log


def without_curves():
    """A context whose runs write no curves.png."""
    return _drawn_by(lambda *arguments, **options: None)


def with_curves():
    """A context whose runs write curves.png, as those of users do."""
    return _drawn_by(plot_log)


@contextmanager
def _drawn_by(draw):
    before, run_report.plot_log = run_report.plot_log, draw
    try:
        yield
    finally:
        run_report.plot_log = before
