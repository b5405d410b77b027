"""A Parquet table of a file's rows and their vectors."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fastenc._base.extras import require
from fastenc.data.readers import Row, in_parts

VECTOR = "embedding"  # name of the vectors' column
ROWS_AT_ONCE = 10_000  # rows in a row group


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
        self._numpy = require("numpy", extra="parquet")
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

    def write(self, path: Path, rows: Iterable[Row], vectors: Path) -> None:
        """Write the table.

        Args:
            rows: all rows that :meth:`look_at` saw, in the same order.
            vectors: file of nothing but their vectors.
        """
        arrow, start = self._arrow, 0
        # Of a file without vectors there are no rows either, and an empty file cannot be mapped.
        stored = self._numpy.memmap(vectors, self.dtype, "r").reshape(-1, self.width)
        number = arrow.from_numpy_dtype(stored.dtype)
        schema = self._schema.append(arrow.field(VECTOR, arrow.list_(number, self.width)))
        with self._parquet.ParquetWriter(path, schema) as writer:
            for part in in_parts(rows, ROWS_AT_ONCE):
                columns: list[Any] = [
                    arrow.array([row.get(field.name) for row in part], field.type)
                    for field in self._schema
                ]
                flat = arrow.array(stored[start : start + len(part)].reshape(-1))
                columns.append(arrow.FixedSizeListArray.from_arrays(flat, self.width))
                writer.write_table(arrow.table(columns, schema=schema))
                start += len(part)
