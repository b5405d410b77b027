"""fastenc evaluate."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastenc._base.files import write_text_atomically
from fastenc._base.options import argument, option, options_listed_by
from fastenc.cli.encoders import with_finite_weights
from fastenc.cli.options import Command
from fastenc.cli.outputs import (
    DEVICE,
    DTYPE,
    check_output,
    checked_dtype,
    device_named,
    format_metrics,
    make_writable,
    write_lines,
)
from fastenc.cli.task_options import all_task_options
from fastenc.packing import check_batch_size
from fastenc.tasks import task_of_model
from fastenc.tasks.registry import columns_for


@dataclass(frozen=True, kw_only=True)
class Evaluate(Command):
    """Measure a fine-tuned model on labelled data.

    The options of the task, such as columns, tags and lengths, are those of the training unless others are given. A
    model that was trained with transformers has no such options stored.

    Examples:
    fastenc evaluate runs/sst2 test.tsv -o test.json
    fastenc evaluate runs/ner test.conll --report reports/ner
    """

    model: str = argument("Folder of a fine-tuned model, which contains its task.")
    inputs: str = argument("Labelled data in the format of the training data (also .gz).")
    output: Path | None = option(None, "File for the metrics: .json.", "-o")
    report: Path | None = option(
        None,
        "Folder for the metrics of each class (classes.tsv), the confusion matrix (confusion.tsv) and the wrong "
        "predictions (mistakes.jsonl).",
    )
    batch_size: int = option(32, "Number of sequences in a batch.")
    device: str | None = option(None, DEVICE)
    dtype: str = option("float32", DTYPE)
    task_options: dict[str, Any] = options_listed_by(all_task_options)

    def run(self) -> None:
        check_batch_size(self.batch_size)
        if self.output is not None:
            check_output(self.output, (".json",), self.inputs)
        dtype, device = checked_dtype(self.dtype), device_named(self.device, self.dtype)
        task = task_of_model(self.model, self.task_options)
        if self.report is not None:
            task.check_report()
            make_writable(self.report)
        model = with_finite_weights(task.load(self.model, dtype=dtype).to(device), self.model)
        if "max_length" in self.task_options:
            task.check_max_length(model)
        with columns_for(self.model):
            data = task.read(self.inputs, model)
        examples = task.encode(data, model)
        metrics, predictions = task.measure(
            model, data, examples, self.batch_size, show_progress=None
        )
        if self.output is not None:
            write_text_atomically(self.output, json.dumps(metrics, indent=1))
        if self.report is not None:
            files = task.report(model, data, predictions)
            for name, lines in files.items():
                write_lines(self.report / name, lines)
            print(f"{', '.join(files)} in {self.report}")
        print(format_metrics(metrics, task.metric_titles(model)))
