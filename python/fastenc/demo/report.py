"""The demo's report: one HTML file that contains its plots."""

import base64
import html
import io
from pathlib import Path

import torch

from fastenc._extras import require
from fastenc._files import write_atomically
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
    matplotlib = require("matplotlib", extra="demo")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 3.8))
    _bars(axes[0], encoding["sentences_per_s"], "sentences per second", "{:.0f}")
    axes[0].set_title("MiniLM, the same outputs")
    _curves(axes[1], pretraining["log"])
    axes[1].axhline(pretraining["frequencies"], color="#999999", linestyle=":")
    axes[1].set_title("A small BERT learns")
    _bars(axes[2], classification["accuracies"], "held-out accuracy", "{:.1%}")
    axes[2].set_title("Which package is this docstring from?")
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    pyplot.close(figure)
    picture = base64.b64encode(buffer.getvalue()).decode()
    text = _PAGE.format(
        picture=picture,
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
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _bars(axis, values: dict[str, float], label: str, form: str) -> None:
    bars = axis.barh(list(values), list(values.values()), color=["#999999", "#4c8cbf", "#1b5e8a"])
    axis.bar_label(bars, [form.format(value) for value in values.values()], padding=3)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    axis.margins(x=0.2)


def _curves(axis, log: list[dict]) -> None:
    for key, name in (("loss", "training"), ("eval_loss", "held out")):
        points = [(line["step"], line[key]) for line in log if key in line]
        axis.plot(*zip(*points, strict=True), label=name, marker="o" if key != "loss" else None)
    axis.set(xlabel="step", ylabel="masked-LM loss (nats)")
    axis.grid(alpha=0.3)
    axis.legend()


def _table(values: dict[str, float], label: str, form: str) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{form.format(value)}</td></tr>"
        for name, value in values.items()
    )
    return f"<table><tr><th></th><th>{label}</th></tr>{rows}</table>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>fastenc demo</title><style>
body {{ font-family: sans-serif; max-width: 70em; margin: 2em auto; line-height: 1.4 }}
img {{ width: 100% }} td, th {{ padding: 0.1em 1em 0.1em 0; text-align: left }}
</style></head><body>
<h1>fastenc demo</h1>
<p>torch {torch}, {threads} threads, {minutes:.1f} minutes in all; texts: the docstrings of this Python.</p>
<img src="data:image/png;base64,{picture}" alt="Speed, masked-LM loss and accuracy">
<h2>Encoding with a real checkpoint</h2>
<p>{sentences} docstrings in batches of 32, in the order of reading: {tokens} tokens, {padded} with padding. Largest
difference of a hidden state from transformers: {difference:.1e}.</p>{encoding}
<h2>Pretraining</h2>
<p>A BERT of {layers} layers and width {width}: held-out masked-LM loss {before:.2f} before training, {after:.2f} after.
A model that knows only the tokens' frequencies has {frequencies:.2f} (the dotted line).</p>
<h2>Fine-tuning</h2>
<p>{training} training texts, {held_out} from other files held out, the packages' names removed; classes:
{classes}.</p>{accuracies}
</body></html>
"""
