"""Predicts for a file part by part, so that memory does not grow with the file and a run can be resumed."""

from dataclasses import asdict
from itertools import islice
from pathlib import Path

from fastenc._base.files import check_not_input
from fastenc._base.prefetch import prefetch
from fastenc._base.progress import Counter
from fastenc.models.pretrained import PretrainedModel
from fastenc.tasks.base import Task
from fastenc.tasks.parts_file import PartsFile, run_settings

PART = 256  # number of items that are read, encoded and predicted together


def predict_file(
    task: Task,
    model: PretrainedModel,
    inputs: str | Path,
    output: str | Path,
    batch_size: int = 32,
    *,
    resume: bool = False,
    model_name: str = "",
    show_progress: bool | None = None,
) -> int:
    """Write a prediction for every item of a file to another file.

    The whole file is read once before the first prediction, so that a malformed line is reported early. Then, while the
    model computes one part of ``PART`` items, another thread encodes the next part. Finished parts are kept
    (:class:`fastenc.tasks.parts_file.PartsFile`).

    Args:
        output: its suffix is one of ``task.outputs``.
        batch_size: number of examples that the model takes at a time.
        resume: continue an unfinished run after its last kept part; if there is none, start.
        model_name: folder or name on the hub of the model; a resumed run must have the same.
        show_progress: None shows a bar if stderr is a terminal, else a line every ten seconds.
    Returns: the number of predictions.
    Raises: ValueError as ``task.read_inputs``, if input and output are the same file, if there is an unfinished run and
        ``resume`` is False, if that run had another model, other options or another input file, or if the number of
        items of the file changes during the run.
    """
    output = Path(output)
    check_not_input(output, inputs)
    settings = {
        **run_settings(model, model_name, inputs, output),
        "task": [task.name, asdict(task)],
        "part": PART,
    }
    with PartsFile(output, "items", settings, resume) as file:
        sizes = [len(part) for part in task.input_parts(inputs, PART)]
        show = show_progress if len(sizes) > 1 else False
        within = show_progress if len(sizes) == 1 else False
        with Counter("predicting", "items", sum(sizes), file.done, show) as counter:
            parts = islice(task.input_parts(inputs, PART), -(-file.done // PART), None)
            for data, examples in prefetch(lambda part: (part, task.encode(part, model)), parts):
                predictions = task.predict_encoded(model, data, examples, batch_size, within)
                lines = task.lines(model, data, predictions, output.suffix)
                begin = 1 if file.done and output.suffix in task.headed else 0
                text = "".join(f"{line}\n" for line in islice(lines, begin, None))
                file.append([text.encode()], len(data))
                counter.add(len(data))
        file.check_total(sum(sizes), inputs)
    return sum(sizes)
