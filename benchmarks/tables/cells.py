"""What a table shows of a provider's row in the results: a time, a speed-up, or why there is none."""

from collections.abc import Callable, Sequence

from benchmarks.tables.markdown import row as line
from benchmarks.tables.markdown import table

NOTHING = "–"


def grid(
    cases: dict, columns: dict[str, str], unit: str, cell: Callable[[dict | None], str]
) -> str:
    """A row for each provider, a column for each case.

    Args: columns: {case: heading}. unit: the heading above the providers.
    """
    rows = (
        line([provider, *(cell(cases[case].get(provider)) for case in columns)])
        for provider in providers_of([cases[case] for case in columns])
    )
    return table(line([unit, *columns.values()]), rows)


def providers_of(cases: Sequence[dict]) -> list[str]:
    """The providers of several cases, in the order of their first appearance."""
    return list(dict.fromkeys(name for rows in cases for name in rows))


def state(row: dict | None) -> str | None:
    """The words in place of a time, or None if there is a time."""
    if row is None:
        return NOTHING
    if "missing" in row:
        return row["missing"]
    return next((word for word in ("wrong", "failed") if word in row), None)


def speedup(row: dict | None) -> str:
    return state(row) or f"{row['speedup']:.2f}×"


def speedup_over(rows: dict, provider: str, peer: str) -> float:
    """How many times as fast as the peer the provider is."""
    return rows[peer]["median_ms"] / rows[provider]["median_ms"]


def time_and_speedup(row: dict | None) -> str:
    if problem := state(row):
        return problem
    shown = f"{_digits(row['median_ms'])} ms"
    return shown + (f", {row['speedup']:.2f}×" if "speedup" in row else "")


def time_and_roofline(row: dict | None) -> str:
    shown = time_and_speedup(row)
    if row and "percent_of_roofline" in row and not state(row):
        shown += f", {row['percent_of_roofline']:.0f} %"
    return shown


def tokens_and_mfu(row: dict | None) -> str:
    if problem := state(row):
        return problem
    shown = f"{_digits(row['tokens_per_s'] / 1e3)} k/s, MFU {row['MFU_percent']:.0f} %"
    return shown + (f", {_digits(row['peak_MB'] / 1024)} GB" if "peak_MB" in row else "")


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
