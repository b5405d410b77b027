"""The predictions of a whole file, part by part: flat memory, tokens made ahead, and resumable."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from fastenc._files import write_atomically
from fastenc._progress import progress_bar
from fastenc.tasks.base import Task

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
    written = output.with_name(f"{output.name}.part")
    progress = output.with_name(f"{output.name}.part.json")
    settings = {
        "model": [model_name, _stamp(Path(model_name), output.name) if model_name else []],
        "inputs": [str(inputs), _stamp(Path(inputs), output.name)],
        "task": [task.name, asdict(task)],
        "part": PART,
    }
    settings = json.loads(json.dumps(settings))
    done = _progress(written, progress, settings, resume)
    sizes = [len(part) for part in task.input_parts(inputs, PART)]
    output.parent.mkdir(parents=True, exist_ok=True)
    bar = progress_bar(
        _encoded(task, model, inputs, done["parts"]),
        "predicting",
        "part",
        show_progress if len(sizes) > 1 else False,
        initial=done["parts"],
        total=len(sizes),
    )
    with open(written, "r+b" if written.exists() else "w+b") as file:
        # What was appended after the last count is predicted again.
        file.truncate(done["bytes"])
        file.seek(done["bytes"])
        for data, examples in bar:
            within = show_progress if len(sizes) == 1 else False
            predictions = task.predict_encoded(model, data, examples, batch_size, within)
            lines = task.lines(model, data, predictions, output.suffix)
            begin = 1 if done["parts"] and output.suffix in task.headed else 0
            for line in islice(lines, begin, None):
                file.write(f"{line}\n".encode())
            file.flush()
            os.fsync(file.fileno())
            done = {**done, "parts": done["parts"] + 1, "bytes": file.tell()}
            text = json.dumps(done)
            write_atomically(progress, lambda path, text=text: path.write_text(text))  # type: ignore[misc]
    progress.unlink()
    os.replace(written, output)
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


def _progress(written: Path, progress: Path, settings: dict, resume: bool) -> dict[str, Any]:
    """How far an earlier run came: {"settings", "parts", "bytes"}."""
    if not (written.exists() and progress.exists()):
        progress.unlink(missing_ok=True)
        return {"settings": settings, "parts": 0, "bytes": 0}
    done = json.loads(progress.read_text())
    if not resume:
        raise ValueError(
            f"{written} holds predictions of a run that did not end: resume it (--resume), or delete the file"
        )
    for name, value in settings.items():
        if done["settings"].get(name) != value:
            raise ValueError(
                f"{written} was begun with another {name}, {done['settings'].get(name)}, got {value}: "
                "go on with the same, or delete the file"
            )
    return done


def _stamp(path: Path, output: str) -> list[list[Any]]:
    """Name, size and time of change of a file, or of a folder's files but the output's; nothing for a name on the
    hub."""
    files = [path] if path.is_file() else sorted(f for f in path.glob("*") if f.is_file())
    own = (output, f"{output}.part", f"{output}.part.json")
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.name not in own]
