"""A Parquet table of a file's rows and their vectors."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fastenc._base.extras import require
from fastenc.data.readers import in_parts
from fastenc.data.rows import Row
from fastenc.tasks.embedding_format import ROWS_AT_ONCE

VECTOR = "embedding"  # name of the vectors' column


class ParquetTable:
    """Writes a table with all columns of the rows and, last, a column of vectors.

    :meth:`look_at` must see every row first, because the types of the columns stand at the beginning of the file.

    Args:
        width: numbers in a vector.
        dtype: name of their type.
    Raises: ImportError without pyarrow.
    """

    def __init__(self, width: int, dtype: str):
        self._arrow = require("pyarrow", extra="parquet")
        self._parquet = require("pyarrow.parquet", extra="parquet")
        self.width, self.dtype = width, dtype
        self._schema = self._arrow.schema([])

    def look_at(self, rows: Sequence[Row]) -> None:
        """Learn the columns and their types.

        Raises: ValueError for a column named as the vectors' one, or with values of types that do not go together.
        """
        arrow = self._arrow
        for name in dict.fromkeys(name for row in rows for name in row):
            if name == VECTOR:
                raise ValueError(
                    f"the input must not have a column {VECTOR!r}, which the vectors get: rename it"
                )
            try:
                column_type = arrow.array([row.get(name) for row in rows]).type
                self._schema = arrow.unify_schemas(
                    [self._schema, arrow.schema([(name, column_type)])],
                    promote_options="permissive",
                )
            except (arrow.ArrowException, ValueError, OverflowError) as error:
                raise ValueError(
                    f"column {name!r} must hold values of one type for a .parquet file, got others ({error}): correct "
                    "them, leave the column out, or write .npy"
                ) from error

    def write(self, path: Path, rows: Iterable[Row], vectors: Iterable[Any]) -> None:
        """Write the table.

        Args:
            rows: all rows that :meth:`look_at` saw, in the same order.
            vectors: arrays of their vectors, of :data:`ROWS_AT_ONCE` rows each.
        """
        arrow = self._arrow
        number = arrow.from_numpy_dtype(self.dtype)
        schema = self._schema.append(arrow.field(VECTOR, arrow.list_(number, self.width)))
        with self._parquet.ParquetWriter(path, schema) as writer:
            for part, block in zip(in_parts(rows, ROWS_AT_ONCE), vectors, strict=True):
                columns: list[Any] = [
                    arrow.array([row.get(field.name) for row in part], field.type)
                    for field in self._schema
                ]
                flat = arrow.array(block.reshape(-1))
                columns.append(arrow.FixedSizeListArray.from_arrays(flat, self.width))
                writer.write_table(arrow.table(columns, schema=schema))
