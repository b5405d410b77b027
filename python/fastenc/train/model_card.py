"""The model card: a README.md about a saved model, its data, its results, its training and its use."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import fastenc
from fastenc._base import provenance
from fastenc._base.extras import require
from fastenc.models import MaskedLM, Seq2Seq
from fastenc.models.pretrained import PretrainedModel

CARD = "README.md"
PACKAGES = ("torch", "accelerate", "tokenizers", "safetensors", "transformers")
# Task → its pipeline tag on Hugging Face's hub.
PIPELINES = {
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "span-ner": "token-classification",
    "question-answering": "question-answering",
    "sentence-embedding": "sentence-similarity",
    "seq2seq": "text2text-generation",
}
# Metric → its name among the metrics of Hugging Face's hub, where the two differ.
METRICS = {"pearson": "pearsonr", "spearman": "spearmanr", "mcc": "matthews_correlation"}
# Settings that a resumed run compares, but that say nothing to a reader or stand elsewhere in the card.
NOT_SHOWN = re.compile(
    r"model\..*|data|task|held_out|.* (texts|examples)|label_names|problem_type|trained parameters|"
    r"micro-batches a step.*"
)
PREDICTOR = """```python
import fastenc

predictor = fastenc.predictor("{folder}")
predictions = predictor.predict([...])
```"""
VECTORS = """```python
from fastenc import Encoder

encoder = Encoder.from_pretrained("{folder}")
vectors = encoder.encode(["a text", "another"])
```"""
FILES = """```sh
fastenc predict {folder} words.tsv -o senses.tsv
```"""
# Task → its code; None: a pretrained model. The other tasks have PREDICTOR.
USAGES = {None: VECTORS, "sentence-embedding": VECTORS, "word-sense": FILES}


@dataclass(frozen=True)
class Origin:
    """What a run starts from.

    Fields:
        base: checkpoint folder, or name on the hub, of the first weights; None: that of the model, if it was loaded.
        train, dev: files or names of the data; none if they are given from Python.
    """

    base: str | None = None
    train: tuple[str, ...] = ()
    dev: str | None = None


def model_card(
    folder: Path,
    model: PretrainedModel,
    settings: Mapping[str, object],
    summary: Sequence[str],
    metrics: dict[str, float],
    titles: Mapping[str, str] | None = None,
    origin: Origin | None = None,
    held_out: int | None = None,
) -> str:
    """The text of the card.

    Args:
        folder: the model's folder.
        settings: the settings that the weights depend on.
        summary: lines about the data.
        metrics: metrics on held-out data; {} if there are none.
        titles: {metric: title} of metrics whose name alone does not say what they measure.
        held_out: number of items that the metrics are of.
    """
    origin = origin or Origin()
    config, titles = model.config, titles or {}
    task = cast("str | None", settings.get("task"))
    learnt = task or str(settings.get("objective", "mlm"))
    kind = "encoder-decoder" if isinstance(model, Seq2Seq) else "encoder"
    pipeline = PIPELINES.get(task) if task else _pipeline_of_pretrained(model)
    base = origin.base or model.base
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = settings.get("trained parameters", parameters)
    about = f"fine-tuned for {learnt}" if task else f"pretrained by {learnt}"
    training = {
        "date": provenance.today(),
        "command": _code(provenance.command() or "called from Python"),
        "versions": ", ".join(f"{n} {v}" for n, v in provenance.versions(*PACKAGES).items()),
        **shown_settings(settings),
    }
    number = "" if held_out is None else f", n = {held_out:,}"
    measured_on = f"On {_code(origin.dev) if origin.dev else 'held-out data'}{number}:"
    results = {titles.get(name, name): _number(value) for name, value in metrics.items()}
    sections = [
        f"---\n{_metadata(folder, learnt, pipeline, base, metrics, titles, origin, held_out)}\n---",
        f"# {folder.resolve().name}",
        f"A {config.family} {kind}, {about}: {config.num_layers} layers, {config.hidden_size} wide, {parameters:,} "
        f"parameters, {trained:,} of them trained. Made with fastenc {fastenc.__version__}.",
        f"Base model: {_code(hub_name(base) or base) if base else 'none, the first weights are random'}.",
        "## Data",
        "\n".join(f"- {line}" for line in (*_files(origin), *summary)) or "Not described.",
        "## Results on held-out data",
        f"{measured_on}\n\n{_table(results, 'metric')}" if metrics else "Not measured.",
        "## Training",
        _table(training, "setting"),
        "## Use",
        USAGES.get(task, PREDICTOR).format(folder=folder),
    ]
    return "\n\n".join(sections) + "\n"


def shown_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings that a user can give, by the names of their options."""
    if settings.get("max_steps"):  # which replaces them
        settings = {name: value for name, value in settings.items() if name != "epochs"}
    given = lambda value: value is not None and value is not False and value not in ("", [], ())
    flat: dict[str, object] = {}
    for name, value in settings.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return {
        name.replace("_", "-"): _shown(value)
        for name, value in flat.items()
        if given(value) and not NOT_SHOWN.fullmatch(name)
    }


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def hub_name(base: str | None) -> str | None:
    """The name on Hugging Face's hub of a checkpoint, from its folder in the hub's cache; None for other folders."""
    match = re.search(r"models--([^/\\]+)[/\\]snapshots[/\\]", f"{base}/")
    if match:
        return match[1].replace("--", "/", 1)
    is_name = base is not None and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", base)
    return base if is_name and not Path(str(base)).exists() else None


def _pipeline_of_pretrained(model: PretrainedModel) -> str | None:
    """The pipeline tag of a model that no task has fine-tuned; None: a discriminator has no pipeline."""
    if isinstance(model, Seq2Seq):
        return "text2text-generation"
    return "fill-mask" if isinstance(model, MaskedLM) else None


def _metadata(
    folder: Path,
    learnt: str,
    pipeline: str | None,
    base: str | None,
    metrics: Mapping[str, float],
    titles: Mapping[str, str],
    origin: Origin,
    held_out: int | None,
) -> str:
    """The card's head: YAML by huggingface_hub, which the hub reads."""
    hub = require("huggingface_hub", extra="train")
    name = Path(origin.dev).name if origin.dev else "held-out data"
    results = [
        hub.EvalResult(
            task_type=pipeline or learnt,
            dataset_type=name,
            dataset_name=name,
            dataset_args=None if held_out is None else {"num_examples": held_out},
            metric_type=METRICS.get(metric, metric),
            metric_name=titles.get(metric, metric),
            metric_value=value,
        )
        for metric, value in metrics.items()
        if math.isfinite(value)  # the hub refuses others
    ]
    data = hub.ModelCardData(
        library_name="fastenc",
        pipeline_tag=pipeline,
        base_model=hub_name(base),
        model_name=folder.resolve().name if results else None,
        eval_results=results or None,
    )
    return data.to_yaml()


def _files(origin: Origin) -> list[str]:
    named = (("training", origin.train), ("held out", (origin.dev,) if origin.dev else ()))
    return [f"{use}: {', '.join(map(_code, names))}" for use, names in named if names]


def _code(text: str) -> str:
    return f"`{text}`"


def _number(value: float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value}"


def _table(values: Mapping[str, object], title: str) -> str:
    cell = lambda value: str(value).replace("|", "\\|").replace("\n", " ")
    rows = [f"| {title} | value |", "|---|---|"]
    return "\n".join(
        [*rows, *(f"| {cell(name)} | {cell(value)} |" for name, value in values.items())]
    )
