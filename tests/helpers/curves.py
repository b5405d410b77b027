"""Whether the runs of tests draw their curves."""

from contextlib import contextmanager

from fastenc.train import loop
from fastenc.train.plot import plot_log


def without_curves():
    """A context whose runs write no curves.png."""
    return _drawn_by(lambda *arguments, **options: None)


def with_curves():
    """A context whose runs write curves.png, as those of users do."""
    return _drawn_by(plot_log)


@contextmanager
def _drawn_by(draw):
    before, loop.plot_log = loop.plot_log, draw
    try:
        yield
    finally:
        loop.plot_log = before
