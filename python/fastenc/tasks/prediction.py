"""The predictions of a whole file, part by part: flat memory, tokens made ahead, and resumable."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from fastenc._progress import progress_bar
from fastenc.tasks.base import Task
from fastenc.tasks.parts_file import PartsFile, file_stamp

PART = 10_000  # items that are read, encoded and predicted together


def predict_file(
    task: Task,
    model: Any,
    inputs: str | Path,
    output: str | Path,
    batch_size: int = 32,
    *,
    resume: bool = False,
    model_name: str = "",
    show_progress: bool | None = None,
) -> int:
    """Write the prediction for every item of a file to another.

    The file is read through once before the first prediction, so that a malformed line is named at once. Then, while
    the model is at one part of ``PART`` items, another thread reads and encodes the next. Finished parts are appended
    to ``output``.part and counted in ``output``.part.json; at the end .part takes the place of ``output``.

    Args:
        output: its suffix is one of ``task.outputs``.
        resume: go on after the last finished part of a run that was killed, or start if there is none.
        model_name: where the model comes from, which a resumed run must share.
    Returns: the number of predictions.
    Raises: ValueError as ``task.read_inputs``, when input and output are one file, when an unfinished run is there and
        ``resume`` is False, or when it had another model, other options or another input file.
    """
    output = Path(output)
    if output.exists() and Path(inputs).exists() and output.samefile(inputs):
        raise ValueError(f"the output {output} is the input itself: give another file")
    settings = {
        "model": [model_name, file_stamp(Path(model_name), output.name) if model_name else []],
        "inputs": [str(inputs), file_stamp(Path(inputs), output.name)],
        "task": [task.name, asdict(task)],
        "part": PART,
    }
    file = PartsFile(output, settings, resume)
    sizes = [len(part) for part in task.input_parts(inputs, PART)]
    bar = progress_bar(
        _encoded(task, model, inputs, file.parts),
        "predicting",
        "part",
        show_progress if len(sizes) > 1 else False,
        initial=file.parts,
        total=len(sizes),
    )
    with file:
        for data, examples in bar:
            within = show_progress if len(sizes) == 1 else False
            predictions = task.predict_encoded(model, data, examples, batch_size, within)
            lines = task.lines(model, data, predictions, output.suffix)
            begin = 1 if file.parts and output.suffix in task.headed else 0
            file.append(f"{line}\n".encode() for line in islice(lines, begin, None))
    return sum(sizes)


def _encoded(task: Task, model: Any, inputs: str | Path, skip: int) -> Iterator[tuple[Any, list]]:
    """(data, examples) of each part after the first ``skip``, made by another thread one part ahead."""
    parts = islice(task.input_parts(inputs, PART), skip, None)

    def encode_next() -> tuple[Any, list] | None:
        data = next(parts, None)
        return None if data is None else (data, task.encode(data, model))

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(encode_next)
        while (part := ahead.result()) is not None:
            ahead = pool.submit(encode_next)
            yield part
