"""Embeds the texts of a file part by part, so that memory does not grow with the file and a run can be resumed."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import write_atomically
from fastenc._base.progress import Counter
from fastenc.data.readers import Row, in_parts, input_rows
from fastenc.models import Encoder
from fastenc.models.embedding.encode import encode_parts
from fastenc.models.embedding.text_batches import BATCHES_AT_ONCE
from fastenc.tasks.embedding_table import ParquetTable
from fastenc.tasks.parts_file import PartsFile, file_stamp

OUTPUTS = (".safetensors", ".npy", ".parquet")
STORED = {"float32": torch.float32, "float16": torch.float16}
ID = "id"  # column of a table that names its rows


@dataclass(frozen=True)
class Embedded:
    """What :func:`embed_file` wrote.

    Fields:
        number: number of vectors.
        width: numbers in a vector.
        ids: the file of ids, or None.
    """

    number: int
    width: int
    ids: Path | None = None


def embed_file(
    encoder: Encoder,
    inputs: str | Path,
    output: str | Path,
    text: str = "sentence",
    *,
    store_as: str = "float32",
    batch_size: int = 32,
    resume: bool = False,
    model_name: str = "",
    quoting: str | None = None,
    show_progress: bool | None = None,
    **options: Any,
) -> Embedded:
    """Write a vector for every text of a file: (texts, hidden_size), in the order of the texts.

    The whole file is read once before the first vector is computed, so that a malformed line is reported early. Then,
    while the model computes one part of the texts, another thread tokenises the next part.

    Args:
        output: .npy, .safetensors with the tensor name "embeddings", or .parquet (extra: parquet) with all columns of
            the input and the column "embedding". If a table has a column "id", NAME.ids.txt beside a .npy or
            .safetensors file has the id of each vector, one on each line.
        text: column of the text in a table.
        store_as: number type of the vectors in the file, "float32" or "float16".
        batch_size: number of texts in a batch.
        resume: continue an unfinished run after its last kept part; if there is none, start.
        model_name: folder or name on the hub of the model; a resumed run must have the same.
        quoting: of a .tsv file, see :func:`fastenc.data.readers.numbered_rows`.
        show_progress: None shows a bar if stderr is a terminal, else a line every ten seconds.
        options: those of :meth:`Encoder.encode` that say what a vector is.
    Raises: ValueError as :func:`fastenc.data.read_inputs` and :class:`PartsFile`, and for a vector that float16 cannot
        hold. OSError with what is kept if the disk is full.
    """
    output = Path(output)
    if output.suffix not in OUTPUTS:
        raise ValueError(f"output must end in {' or '.join(OUTPUTS)}, got {output}: rename it")
    if store_as not in STORED:
        raise ValueError(
            f"store_as must be {' or '.join(STORED)}, got {store_as!r}: give one of them"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}: give more")
    if (precision := options.pop("precision", "float32")) != "float32":
        raise ValueError(
            f"precision must be float32 in a file, whose parts have other ranges, got {precision!r}: give the stored "
            "vectors to quantize_vectors"
        )
    width = options.get("truncate_dim") or encoder.config.hidden_size
    table = ParquetTable(width, store_as) if output.suffix == ".parquet" else None
    settings = {
        "model": [
            model_name,
            file_stamp(Path(model_name), output.name) if model_name else [],
            *(["int8"] if encoder.in_8_bits else []),
        ],
        "inputs": [str(inputs), file_stamp(Path(inputs), output.name)],
        "options": [text, quoting, store_as, batch_size, options],
    }
    read = lambda: input_rows(inputs, text, quoting)
    with PartsFile(output, "texts", settings, resume) as file:
        number, has_ids = _check(read(), table)
        parts = in_parts(islice(read(), file.done, None), BATCHES_AT_ONCE * batch_size)
        texts = ([row[text] for _, row in rows] for rows in parts)
        with (
            Counter("embedding", "texts", number, file.done, show_progress) as counter,
            encoder.frozen.during_call(encoder, calls=number),
        ):
            for vectors in encode_parts(encoder, texts, batch_size=batch_size, **options):
                head = b"" if file.done else _header(output.suffix, number, width, store_as)
                file.append([head, _bytes(vectors, STORED[store_as], file.done)], len(vectors))
                counter.add(len(vectors))
        if table is not None:
            file.convert(lambda part, path: table.write(path, (row for _, row in read()), part))
            return Embedded(number, width)
        if not has_ids:
            return Embedded(number, width)
        ids = output.with_suffix(".ids.txt")
        write_atomically(ids, lambda path: _write_ids(path, read()))
        return Embedded(number, width, ids)


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
    if isinstance(value, bool) or not isinstance(value, str | int) or "\n" in str(value):
        raise ValueError(
            f"{where}: column {ID!r} must hold a text on one line or a whole number, got {value!r}: correct it, or "
            "rename the column"
        )
    return str(value)


def _write_ids(path: Path, rows: Iterator[tuple[str, Row]]) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{_id_of(where, row)}\n" for where, row in rows)


def _bytes(vectors: Tensor, dtype: torch.dtype, first: int) -> memoryview:
    """The bytes of vectors in a file, without a copy of them. ``first``: number of the first one, for the error."""
    exact = vectors.float().cpu()
    stored = exact.to(dtype)
    lost = stored.isinf().any(1) & exact.isfinite().all(1)
    if lost.any():
        raise ValueError(
            f"store_as must be float32 for these vectors, got float16: text {first + int(lost.nonzero()[0]) + 1:,} has "
            f"a number beyond {torch.finfo(dtype).max:,.0f}: give float32, or normalise the vectors"
        )
    return stored.numpy().data.cast("B")


def _header(suffix: str, rows: int, width: int, store_as: str) -> bytes:
    """The bytes before the first vector in a file with this suffix."""
    size = STORED[store_as].itemsize
    if suffix == ".parquet":  # the parts are numbers alone, of which the table is made at the end
        return b""
    if suffix == ".npy":
        numpy = require("numpy", extra="train")
        head = io.BytesIO()
        description = {"descr": f"<f{size}", "fortran_order": False, "shape": (rows, width)}
        numpy.lib.format.write_array_header_1_0(head, description)
        return head.getvalue()
    # Eight bytes hold the length of the JSON after them. Spaces pad the JSON so that the vectors begin at a multiple of
    # eight bytes.
    entry = {
        "dtype": f"F{8 * size}",
        "shape": [rows, width],
        "data_offsets": [0, size * rows * width],
    }
    text = json.dumps({"embeddings": entry}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
