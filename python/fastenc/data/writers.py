"""Predictions as lines: a table with a header, or JSON lines."""

import json
from collections.abc import Iterator, Sequence
from typing import Any


def table_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows below a header, cells separated by tabs. Floating-point numbers have six decimals; lists have commas."""
    if rows:
        yield "\t".join(rows[0])
    for row in rows:
        yield "\t".join(map(_cell, row.values()))


def json_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    return (json.dumps(row, ensure_ascii=False) for row in rows)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6f}"
    return ",".join(value) if isinstance(value, list) else str(value)
