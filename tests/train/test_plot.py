"""The picture of a run: the content of its panels."""

import json

import pytest

from fastenc.train.plot import plot_log

figure_module = pytest.importorskip("matplotlib.figure")
LOG = [
    {"step": 1, "loss": 2.0, "learning_rate": 1e-4},
    {"step": 2, "loss": 1.0, "learning_rate": 5e-5},
    {"step": 2, "eval_loss": 1.5, "eval_f1": 0.5},
    {"step": 3, "loss": 0.5, "learning_rate": 0.0},
    {"step": 3, "eval_loss": 1.7, "eval_f1": 0.4},
]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that a test saves."""
    figures = []
    save = figure_module.Figure.savefig
    monkeypatch.setattr(
        figure_module.Figure,
        "savefig",
        lambda self, *given, **options: (figures.append(self), save(self, *given, **options)),
    )
    return figures


def test_losses_metric_learning_rate_and_the_best_step(tmp_path, drawn):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in LOG))
    plot_log(log, tmp_path / "curves.png", "f1", best=2, title="run, trained on x.tsv")
    (figure,) = drawn
    loss, metric, rate = figure.axes
    lines = lambda axes: {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines(loss)["training"] == [[1, 2.0], [2, 1.0], [3, 0.5]]
    assert lines(loss)["evaluation"] == [[2, 1.5], [3, 1.7]]
    assert lines(metric)["evaluation"] == [[2, 0.5], [3, 0.4]]
    assert lines(rate)["training"] == [[1, 1e-4], [2, 5e-5], [3, 0.0]]
    for axes in figure.axes:
        assert [x for x, _ in lines(axes)["best: step 2"]] == [2, 2]
        assert axes.get_xlabel() == "optimiser steps"
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "loss (mean over items)",
        "f1",
        "learning rate",
    ]
    assert figure.get_suptitle() == "run, trained on x.tsv"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_an_evaluation_nothing_is_marked(tmp_path, drawn):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in LOG[:2]))
    plot_log(log, tmp_path / "curves.png")
    (figure,) = drawn
    assert [[line.get_label() for line in axes.lines] for axes in figure.axes] == [
        ["training"],
        ["training"],
    ]
