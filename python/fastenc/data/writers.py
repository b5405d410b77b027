"""Lines of predictions: a table with a header, or an object of JSON a line."""

import json
from collections.abc import Iterator, Sequence
from typing import Any


def table_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Cells with tabs between, below a header; floating-point numbers with six decimals."""
    if rows:
        yield "\t".join(rows[0])
    for row in rows:
        yield "\t".join(f"{v:.6f}" if isinstance(v, float) else str(v) for v in row.values())


def json_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    return (json.dumps(row, ensure_ascii=False) for row in rows)
