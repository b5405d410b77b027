"""Formats predictions as the lines of a table, or as JSON lines."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence


def table_lines(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """A header and the rows, with tabs between cells. Floats have six decimals, lists have commas between items."""
    if rows:
        yield "\t".join(rows[0])
    for row in rows:
        yield "\t".join(map(_cell, row.values()))


def lines_of(rows: Sequence[Mapping[str, object]], suffix: str) -> Iterator[str]:
    """The lines of a file that ends in ``suffix``: a table for ".tsv", else JSON."""
    return table_lines(rows) if suffix == ".tsv" else json_lines(rows)


def check_cells(texts: Iterable[str]) -> None:
    """Raises: ValueError for a text that would break the lines of :func:`table_lines`."""
    for text in texts:
        if any(mark in text for mark in "\t\r\n"):
            raise ValueError(
                f"texts in a .tsv file must have no tabs and no line breaks, got {text[:60]!r}: write .jsonl"
            )


def json_lines(rows: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """A JSON object for each row."""
    return (json.dumps(row, ensure_ascii=False) for row in rows)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6f}"
    return ",".join(value) if isinstance(value, list) else str(value)
