"""The model card: a README.md about a saved model, its data, its results, its training and its use."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fastenc
from fastenc._files import write_atomically
from fastenc.models.pretrained import PretrainedModel

NAME = "README.md"
# Task → its pipeline tag on Hugging Face's hub.
PIPELINES = {
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "span-ner": "token-classification",
    "question-answering": "question-answering",
    "sentence-embedding": "sentence-similarity",
}
PREDICTOR = """import fastenc

predictor = fastenc.predictor("{folder}")
predictions = predictor.predict([...])"""
VECTORS = """from fastenc import Encoder

encoder = Encoder.from_pretrained("{folder}")
vectors = encoder.encode(["a text", "another"])"""


def write_card(
    folder: Path,
    model: PretrainedModel,
    settings: dict[str, Any],
    summary: Sequence[str],
    metrics: dict[str, float],
    titles: Mapping[str, str] | None = None,
) -> None:
    """Write the card of a model into its folder.

    Args:
        settings: the settings that the weights depend on.
        summary: lines about the data.
        metrics: metrics on held-out data; {} if there are none.
        titles: {metric: title} of metrics whose name alone does not say what they measure.
    """
    titled = {(titles or {}).get(name, name): value for name, value in metrics.items()}
    text = model_card(folder, model, settings, summary, titled)
    write_atomically(folder / NAME, lambda path: path.write_text(text, encoding="utf-8"))


def model_card(
    folder: Path,
    model: PretrainedModel,
    settings: dict[str, Any],
    summary: Sequence[str],
    metrics: dict[str, float],
) -> str:
    """The text of the card; arguments as in :func:`write_card`."""
    config, task = model.config, settings.get("task")
    if settings.get("max_steps"):  # which replaces them
        settings = {name: value for name, value in settings.items() if name != "epochs"}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    about = (
        f"trained for the task {task}"
        if task
        else f"pretrained by {settings.get('objective', 'masked LM')}"
    )
    head = ["library_name: fastenc"]
    if pipeline := PIPELINES.get(str(task), None if task else "fill-mask"):
        head.append(f"pipeline_tag: {pipeline}")
    usage = VECTORS if task in (None, "sentence-embedding") else PREDICTOR
    sections = [
        "---\n" + "\n".join(head) + "\n---",
        f"# {folder.resolve().name}",
        f"{type(model).__name__} of the family {config.family}, {about}: {config.num_layers} layers, "
        f"{config.hidden_size} wide, {parameters:,} parameters. Made with fastenc {fastenc.__version__}.",
        "## Data",
        "\n".join(f"- {line}" for line in summary) or "Not described.",
        "## Results on held-out data",
        _table(metrics, "metric") if metrics else "Not measured.",
        "## Training",
        _table(settings, "setting"),
        "## Use",
        f"```python\n{usage.format(folder=folder)}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def _table(values: dict[str, Any], title: str) -> str:
    rows = [f"| {title} | value |", "|---|---|"]
    for name, value in values.items():
        shown = f"{value:.4f}" if isinstance(value, float) and title == "metric" else value
        if shown is not None:
            rows.append(f"| {name} | {shown} |")
    return "\n".join(rows)
