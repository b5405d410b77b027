"""Embeds the texts of a file part by part, so that memory does not grow with the file and a run can be resumed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fastenc._base.files import write_atomically
from fastenc._base.progress import Counter
from fastenc.data.readers import in_parts, input_rows
from fastenc.data.rows import Row
from fastenc.models import Encoder
from fastenc.models.embedding.encode import encode_parts, vectors_of
from fastenc.models.embedding.text_batches import BATCHES_AT_ONCE
from fastenc.packing import check_batch_size
from fastenc.tasks.embedding_format import (
    VectorFormat,
    blocks_of,
    ranges_of,
    read_ranges,
    write_array,
)
from fastenc.tasks.embedding_table import ParquetTable
from fastenc.tasks.parts_file import PartsFile, file_stamp, run_settings

ID = "id"  # column of a table that names its rows


@dataclass(frozen=True)
class Embedded:
    """What :func:`embed_file` wrote.

    Fields:
        number: number of vectors.
        width: numbers in a vector of the file.
        ids: the file of ids, or None.
        ranges: the file of the dimensions' ranges, or None.
    """

    number: int
    width: int
    ids: Path | None = None
    ranges: Path | None = None


def embed_file(
    encoder: Encoder,
    inputs: str | Path,
    output: str | Path,
    text: str = "sentence",
    *,
    store_as: str = "float32",
    precision: str = "float32",
    calibration: str | Path | None = None,
    batch_size: int = 32,
    resume: bool = False,
    model_name: str = "",
    quoting: str | None = None,
    show_progress: bool | None = None,
    **options: Any,
) -> Embedded:
    """Write a vector for every text of a file: (texts, width), in the order of the texts.

    The whole file is read once before the first vector is computed, so that a malformed line is reported early. Then,
    while the model computes one part of the texts, another thread tokenises the next part.

    Args:
        output: .npy, .safetensors with the tensor name "embeddings", or .parquet (extra: parquet) with all columns of
            the input and the column "embedding". If a table has a column "id", NAME.ids.txt beside a .npy or
            .safetensors file has the id of each vector, one on each line.
        text: column of the text in a table.
        store_as: number type of the vectors of precision "float32" in the file, "float32" or "float16".
        precision: "float32", "int8", "uint8", "binary" or "ubinary", see :func:`fastenc.models.quantize_vectors`.
        calibration: for "int8" and "uint8", a .npy file of vectors, (rows, dimensions), that give each dimension its
            range, such as NAME.ranges.npy. None: all vectors of this file give them. They are then kept in float32
            until the end, and NAME.ranges.npy beside the output gets the lowest and the highest value of each
            dimension, float32 (2, dimensions): the calibration of the queries' vectors.
        batch_size: number of texts in a batch.
        resume: continue an unfinished run after its last kept part; if there is none, start.
        model_name: folder or name on the hub of the model; a resumed run must have the same.
        quoting: of a .tsv file, see :func:`fastenc.data.rows.numbered_rows`.
        show_progress: None shows a bar if stderr is a terminal, else a line every ten seconds.
        options: those of :meth:`Encoder.encode` that say what a vector is.
    Raises: ValueError as :func:`fastenc.data.read_inputs` and :class:`PartsFile`, for a calibration that is no file of
        such vectors, for a single text that would give the ranges, for a vector that float16 cannot hold, and for a
        file whose number of texts changes during the run. OSError with what is kept if the disk is full.
    """
    output = Path(output)
    check_batch_size(batch_size)
    dimensions = vectors_of(encoder, **options).width
    ranges = None if calibration is None else read_ranges(Path(calibration), dimensions)
    stored = VectorFormat(output.suffix, dimensions, store_as, precision, ranges)
    # Where the stored numbers depend on all vectors, the parts keep the vectors, and the end makes the numbers.
    kept = replace(stored, precision="float32") if stored.lacks_ranges else stored
    table = ParquetTable(stored.width, stored.dtype) if output.suffix == ".parquet" else None
    settings = {
        **run_settings(encoder, model_name, inputs, output),
        "options": [text, quoting, store_as, precision, batch_size, options],
        "calibration": calibration
        and [str(calibration), file_stamp(Path(calibration), output.name)],
    }
    read = lambda: input_rows(inputs, text, quoting)
    of_ranges = output.with_suffix(".ranges.npy") if stored.lacks_ranges else None
    with PartsFile(output, "texts", settings, resume) as file:
        number, has_ids = _check(read(), table)
        if stored.lacks_ranges and number < 2:
            raise ValueError(
                f"{precision} measures the range of each dimension over the texts of the file, got {number}: give "
                "calibration= a file of vectors, or more texts"
            )
        head = b"" if stored.lacks_ranges else stored.header(number)
        parts = in_parts(islice(read(), file.done, None), BATCHES_AT_ONCE * batch_size)
        texts = ([row[text] for _, row in rows] for rows in parts)
        with (
            Counter("embedding", "texts", number, file.done, show_progress) as counter,
            encoder.frozen.during_call(encoder, calls=number),
        ):
            for vectors in encode_parts(encoder, texts, batch_size=batch_size, **options):
                numbers = kept.numbers(vectors, file.done)
                file.append([b"" if file.done else head, numbers.data.cast("B")], len(vectors))
                counter.add(len(vectors))
        file.check_total(number, inputs)

        def convert(part: Path, path: Path) -> None:
            blocks = blocks_of(part, kept.dtype, kept.width)
            if of_ranges is not None:
                low, high = ranges_of(blocks)
                both = torch.stack((low, high))
                write_atomically(of_ranges, lambda path: write_array(path, both))
                final = replace(stored, ranges=(low, high))
                again = blocks_of(part, kept.dtype, kept.width)
                blocks = (final.numbers(torch.from_numpy(block)) for block in again)
            if table is not None:
                return table.write(path, (row for _, row in read()), blocks)
            with open(path, "wb") as whole:
                whole.write(stored.header(number))
                whole.writelines(block.data for block in blocks)

        if table is not None or of_ranges is not None:
            file.convert(convert)
        if table is not None or not has_ids:
            return Embedded(number, stored.width, ranges=of_ranges)
        ids = output.with_suffix(".ids.txt")
        write_atomically(ids, lambda path: _write_ids(path, read()))
        return Embedded(number, stored.width, ids, of_ranges)


def _check(rows: Iterator[tuple[str, Row]], table: ParquetTable | None) -> tuple[int, bool]:
    """(number of rows, whether they have ids).

    Raises: ValueError for a row that cannot be embedded or written.
    """
    number, has_ids = 0, False
    for part in in_parts(rows, 10_000):
        number += len(part)
        if table is not None:
            table.look_at([row for _, row in part])
            continue
        has_ids = ID in part[0][1]
        for where, row in part if has_ids else ():
            _id_of(where, row)
    return number, has_ids


def _id_of(where: str, row: Row) -> str:
    value = row.get(ID)
    is_name = isinstance(value, str | int) and not isinstance(value, bool)
    if not is_name or any(mark in str(value) for mark in "\r\n"):
        raise ValueError(
            f"{where}: column {ID!r} must hold a text on one line or a whole number, got {value!r}: correct it, or "
            "rename the column"
        )
    return str(value)


def _write_ids(path: Path, rows: Iterator[tuple[str, Row]]) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{_id_of(where, row)}\n" for where, row in rows)
