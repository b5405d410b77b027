"""The demo's report: one HTML file that contains its plots, for light and dark backgrounds."""

import html
from pathlib import Path

import torch

from fastenc._base.files import write_text_atomically
from fastenc.analysis.figures import COLOURS, INK, draw
from fastenc.analysis.report import STYLE, named
from fastenc.demo.pretraining import NEW


def write_report(
    path: Path, encoding: dict, pretraining: dict, classification: dict, seconds: float
) -> None:
    """Write the report from the results of the three parts of the demo.

    Args:
        path: the HTML file.
        encoding, pretraining, classification: results of the modules' ``run``.
        seconds: time of the whole demo.
    """
    speeds = encoding["sentences_per_s"]
    speed = _bars("demo-speed", "Speed of MiniLM", speeds, "sentences per second", "{:.0f}")
    loss = _curves(pretraining["log"], pretraining["frequencies"])
    accuracies = classification["accuracies"]
    label = "accuracy on held-out texts"
    accuracy = _bars("demo-accuracy", "Accuracy of classifiers", accuracies, label, "{:.1%}")
    text = _PAGE.format(
        style=STYLE,
        speed=speed,
        loss=loss,
        accuracy=accuracy,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        minutes=seconds / 60,
        encoding=_table(encoding["sentences_per_s"], "sentences/s", "{:.1f}"),
        sentences=encoding["sentences"],
        tokens=encoding["tokens"],
        padded=encoding["padded_tokens"],
        difference=max(encoding["differences"].values()),
        before=pretraining["before"]["loss"],
        after=pretraining["after"]["loss"],
        frequencies=pretraining["frequencies"],
        layers=NEW.layers,
        width=NEW.hidden,
        accuracies=_table(classification["accuracies"], "accuracy", "{:.3f}"),
        classes=html.escape(", ".join(classification["classes"])),
        training=classification["training"],
        held_out=classification["held_out"],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, text)


def _bars(name: str, title: str, values: dict[str, float], label: str, form: str) -> str:
    def paint(grid: list) -> None:
        (axes,) = grid
        colours = [COLOURS[6], COLOURS[5], COLOURS[0]]
        bars = axes.barh(list(values), list(values.values()), color=colours)
        axes.bar_label(bars, [form.format(value) for value in values.values()], padding=3)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.margins(x=0.2)

    return named(draw(paint, name, 2.2), title)


def _curves(log: list[dict], frequencies: float) -> str:
    def paint(grid: list) -> None:
        (axes,) = grid
        for key, name, style in (("loss", "training", "-"), ("eval_loss", "held out", "o-")):
            points = [(line["step"], line[key]) for line in log if key in line]
            axes.plot(*zip(*points, strict=True), style, markersize=4, label=name)
        axes.axhline(frequencies, color=INK, linestyle=":", label="token frequencies alone")
        axes.set(xlabel="optimiser steps", ylabel="masked-LM loss (nats)")

    return named(draw(paint, "demo-loss", 2.8), "Loss of a small BERT")


def _table(values: dict[str, float], label: str, form: str) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{form.format(value)}</td></tr>"
        for name, value in values.items()
    )
    return f"<table><tr><th></th><th>{label}</th></tr>{rows}</table>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>fastenc demo</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head><body>
<h1>fastenc demo</h1>
<p>torch {torch}, {threads} threads, {minutes:.1f} minutes in all; texts: the docstrings of this Python.</p>
<h2>Encoding with a real checkpoint</h2>
<p>{sentences} docstrings in batches of 32, in the order of reading: {tokens} tokens, {padded} with padding. Largest
difference of a hidden state from transformers: {difference:.1e}.</p>{speed}{encoding}
<h2>Pretraining</h2>
<p>A BERT of {layers} layers and width {width}: held-out masked-LM loss {before:.2f} before training, {after:.2f} after.
A model that knows only the tokens' frequencies has {frequencies:.2f} (the dotted line).</p>{loss}
<h2>Fine-tuning</h2>
<p>{training} training texts, {held_out} from other files held out, the packages' names removed; classes:
{classes}.</p>{accuracy}{accuracies}
</body></html>
"""
