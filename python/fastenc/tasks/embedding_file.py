"""Embeds the texts of a file part by part, so that memory does not grow with the file and a run can be resumed."""

import io
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from fastenc._extras import require
from fastenc._progress import progress_bar
from fastenc.data.readers import in_parts, iterate_inputs
from fastenc.models import Encoder
from fastenc.tasks.parts_file import PartsFile, file_stamp

PART = 10_000  # number of texts that are read and embedded together


def embed_file(
    encoder: Encoder,
    inputs: str | Path,
    output: str | Path,
    column: str = "sentence",
    *,
    resume: bool = False,
    model_name: str = "",
    quoting: str | None = None,
    show_progress: bool | None = None,
    **options: Any,
) -> tuple[int, int]:
    """Write a vector for every text of a file: float32 (texts, hidden_size).

    The whole file is read once before the first vector is computed, so that a malformed line is reported early.

    Args:
        output: .npy, or .safetensors with the tensor name "embeddings".
        column: column of the text in a table.
        resume: continue a killed run after its last finished part; if there is none, start.
        model_name: folder or name on the hub of the model; a resumed run must have the same.
        quoting: of a .tsv file, see :func:`fastenc.data.readers.numbered_rows`.
        show_progress: None shows a bar if stderr is a terminal.
        options: of :meth:`Encoder.encode`.
    Returns: (number of vectors, hidden_size).
    Raises: ValueError as :func:`fastenc.data.read_inputs` and :class:`PartsFile`.
    """
    output = Path(output)
    columns: Sequence[str] = [column]
    number = sum(1 for _ in iterate_inputs(inputs, columns, quoting))
    width = encoder.config.hidden_size
    settings = {
        "model": [model_name, file_stamp(Path(model_name), output.name) if model_name else []],
        "inputs": [str(inputs), file_stamp(Path(inputs), output.name)],
        "options": [column, quoting, PART, options],
    }
    with PartsFile(output, settings, resume) as file:
        parts = in_parts(iterate_inputs(inputs, columns, quoting), PART)
        begin = file.parts
        bar = progress_bar(
            islice(parts, begin, None),
            "embedding",
            "part",
            show_progress if number > PART else False,
            initial=begin,
            total=-(-number // PART),
        )
        for texts in bar:
            vectors: Tensor = encoder.encode(
                texts, show_progress=show_progress if number <= PART else False, **options
            )
            head = b"" if file.parts else _header(output.suffix, number, width)
            file.append([head, vectors.float().cpu().contiguous().numpy().tobytes()])
    return number, width


def _header(suffix: str, rows: int, width: int) -> bytes:
    """The bytes before the first vector in a file with this suffix."""
    if suffix == ".npy":
        numpy = require("numpy", extra="train")
        head = io.BytesIO()
        description = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
        numpy.lib.format.write_array_header_1_0(head, description)
        return head.getvalue()
    # Eight bytes hold the length of the JSON after them. Spaces pad the JSON so that the vectors begin at a multiple of
    # eight bytes.
    entry = {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, 4 * rows * width]}
    text = json.dumps({"embeddings": entry}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
