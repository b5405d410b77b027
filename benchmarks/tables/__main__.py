"""Tables from the committed results: python -m benchmarks.tables [--check | --output FILE]

Without an option it writes docs/benchmarks.md, and the tables between the markers of the README and of the other pages.
With --check, a difference is an error. --output writes only the tables of docs/benchmarks.md, of the results below
$FASTENC_RESULTS if that is set.
"""

import argparse
import re
from pathlib import Path

from benchmarks.tables import gpu, guides, readme
from benchmarks.tables.page import HEAD, tables

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
# {name of a marker: function that makes the table below it}
TABLES = {
    "headline": readme.headline,
    "speed": readme.speed,
    "families": readme.families,
    "gpu": gpu.summary,
    "int8": guides.int8_by_processor,
    "measured": guides.other_libraries,
    "products": guides.product_shares,
}
# "<!-- name -->", or "<!-- name: argument -->" for a function with an argument, to "<!-- /name -->".
MARKED = re.compile(
    rf"(<!-- ({'|'.join(TABLES)})(?:: ([\w-]+))? -->\n).*?(<!-- /\2 -->)", re.DOTALL
)


def filled(text: str) -> str:
    """A page with the present tables between its markers."""

    def fill(match: re.Match) -> str:
        begin, name, argument, end = match.groups()
        return begin + TABLES[name](*([argument] if argument else [])) + end

    return MARKED.sub(fill, text)


def pages() -> dict[Path, str]:
    """The texts that the pages with tables have to have."""
    marked = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path: filled(path.read_text(encoding="utf-8")) for path in marked} | {
        PAGE: HEAD + tables()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true")
    choice.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.output:
        given.output.write_text(tables(), encoding="utf-8")
        return 0
    stale = {
        path: text
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    if given.check and stale:
        names = " and ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"{names}: not the committed results: run python -m benchmarks.tables")
        return 1
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
