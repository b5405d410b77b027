"""Writes a report: one HTML page that needs no other file, and the data of its figures as CSV files."""

import csv
import html
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from fastenc._base.files import write_atomically, write_text_atomically
from fastenc.analysis.figures import Figure

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1f24; --soft: #5c6670; --line: #d8dee4; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171b; --ink: #e6e9ec; --soft: #a0a9b2; --line: #333a42; }
}
body { background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  max-width: 46rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 1.5rem 0 .25rem; }
section { border-top: 1px solid var(--line); padding: 1.5rem 0; } section h2 { margin-top: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .9rem; }
dt, .data { color: var(--soft); } dd { margin: 0; } .data { font-size: .9rem; }
svg { width: 100%; max-width: 38rem; height: auto; } a { color: inherit; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .6rem .35rem 0; text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: normal; }
@media (max-width: 40rem) {
  body { margin: 1rem auto; }
  .stacked thead { display: none; }
  .stacked tr { display: block; border-bottom: 1px solid var(--line); padding: .5rem 0; }
  .stacked td { display: block; border: 0; padding: .1rem 0; }
  .stacked td::before { content: attr(data-column) ": "; color: var(--soft); }
}
"""


def data_folder(path: Path) -> Path:
    """The folder of a report's CSV files: NAME_data beside NAME.html."""
    return path.with_name(f"{path.stem}_data")


def write_report(
    path: str | Path, title: str, facts: Mapping[str, str], figures: Sequence[Figure]
) -> None:
    """Write the page ``path`` (.html) and, in the folder NAME_data beside it, a CSV file for each figure.

    Args:
        facts: {name: text} of what the figures depend on: the model, the data, the command, versions and so on.
    """
    path = Path(path)
    folder = data_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for figure in figures:
        link = ""
        if figure.rows:
            file = folder / f"{figure.name}.csv"
            write_atomically(file, partial(_write_csv, figure))
            link = f'<p class="data"><a href="{folder.name}/{file.name}">Data (CSV)</a></p>'
        drawing = named(figure.drawing, figure.title)
        sections.append(
            f'<section id="{figure.name}"><h2>{html.escape(figure.title)}</h2>'
            f"<p>{html.escape(figure.caption)}</p>{drawing}{link}</section>"
        )
    listed = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in facts.items()
    )
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>"
        f"<dl>{listed}</dl>\n{''.join(sections)}</body></html>\n"
    )
    write_text_atomically(path, page)


def named(drawing: str, name: str) -> str:
    """The drawing with a name that programs read aloud."""
    return drawing.replace("<svg ", f'<svg role="img" aria-label="{html.escape(name)}" ', 1)


def _write_csv(figure: Figure, path: Path) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(figure.columns)
        writer.writerows(figure.rows)
