"""Texts and labels from files: text, TSV, CSV, JSONL (each also gzipped), and Hugging Face datasets."""

import csv
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastenc._extras import require

Row = dict[str, Any]
TABLES = (".tsv", ".csv", ".jsonl")


@dataclass(frozen=True)
class LabelledData:
    """Texts or pairs of texts, each with a class index or, without label names, a number."""

    texts: list[str] | list[tuple[str, str]]
    labels: list[int] | list[float]
    label_names: list[str]

    def __len__(self) -> int:
        return len(self.texts)


def read_texts(path: str | Path, column: str | None = None) -> list[str]:
    """The documents of a file or data set.

    A ``.txt`` file holds documents separated by empty lines, a line for each paragraph or sentence. TSV (no
    quoting), CSV and JSONL hold a document a row, in ``column`` ("text" if None). A folder written by
    ``datasets``' save_to_disk, or ``name`` or ``name:split`` on the hub, is read likewise.
    Raises: ValueError with file and line number for a malformed file.
    """
    if _kind(path) != ".txt":
        name = column or "text"
        return [_text(row, name, where) for where, row in _rows(path, [name])]
    documents: list[str] = []
    lines: list[str] = []
    for _, line in _lines(Path(path)):
        if line.strip():
            lines.append(line.strip())
        elif lines:
            documents.append("\n".join(lines))
            lines = []
    if lines:
        documents.append("\n".join(lines))
    if not documents:
        raise ValueError(
            f"{path} holds no text: give a file with at least one line that is not empty"
        )
    return documents


def read_labelled(
    path: str | Path,
    text: Sequence[str] = ("sentence",),
    label: str = "label",
    label_names: Sequence[str] | None = None,
    regression: bool = False,
) -> LabelledData:
    """Labelled texts from a table.

    Args:
        path: a TSV, CSV or JSONL file, a saved data set's folder, or ``name:split`` on the hub.
        text: one column, or two for pairs of texts.
        label: column of the labels.
        label_names: the classes in order, as a training set gave them; None: those found, sorted (as numbers if
            they are numbers).
        regression: labels are numbers to predict.
    Raises: ValueError with file and line number: a missing column, a wrong number of columns, bad JSON, a label
        outside ``label_names``, not UTF-8, no rows.
    """
    if len(text) not in (1, 2):
        raise ValueError(f"text must name one column, or two for pairs, got {list(text)}")
    texts: list[Any] = []
    found: list[tuple[str, str]] = []
    for where, row in _rows(path, [*text, label]):
        parts = tuple(_text(row, name, where) for name in text)
        texts.append(parts if len(parts) == 2 else parts[0])
        found.append((where, str(row[label])))
    if regression:
        return LabelledData(texts, [_number(value, where) for where, value in found], [])
    names = list(label_names) if label_names is not None else _sorted({v for _, v in found})
    index = {name: place for place, name in enumerate(names)}
    for where, value in found:
        if value not in index:
            raise ValueError(
                f"{where}: label {value!r} is not one of {names}: correct the file or the labels"
            )
    return LabelledData(texts, [index[value] for _, value in found], names)


def read_table(path: str | Path, columns: Sequence[str]) -> list[Row]:
    """The rows of a table that has at least these columns."""
    return [row for _, row in _rows(path, columns)]


def _kind(path: str | Path) -> str:
    suffixes = [suffix for suffix in Path(path).suffixes if suffix != ".gz"]
    return suffixes[-1] if suffixes else ""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if not path.is_file():
        raise ValueError(f"{path} is not a file: check the path")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not UTF-8 ({error}): convert the file"
                ) from error


def _rows(path: str | Path, columns: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """(place for error messages, row) of any table, with the columns checked."""
    kind = _kind(path)
    if kind in (".tsv", ".csv"):
        rows = _delimited(Path(path), "\t" if kind == ".tsv" else ",")
    elif kind == ".jsonl":
        rows = _json_lines(Path(path))
    elif kind == ".txt":
        raise ValueError(
            f"{path}: a text file has no columns: give {', '.join(TABLES)} or a data set"
        )
    else:
        rows = _data_set(path)
    empty = True
    for where, row in rows:
        missing = [name for name in columns if name not in row]
        if missing:
            raise ValueError(f"{where}: no column {missing[0]!r}, the columns are {list(row)}")
        empty = False
        yield where, row
    if empty:
        raise ValueError(f"{path} holds no rows")


def _delimited(path: Path, delimiter: str) -> Iterator[tuple[str, Row]]:
    numbers = [0]

    def lines() -> Iterator[str]:
        for number, line in _lines(path):
            numbers[0] = number
            yield line + "\n"

    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.reader(lines(), delimiter=delimiter, quoting=quoting, strict=True)
    header: list[str] | None = None
    while True:
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"{path}, line {numbers[0]}: {error}") from error
        where = f"{path}, line {numbers[0]}"
        if header is None:
            header = values
        elif values:
            if len(values) != len(header):
                raise ValueError(
                    f"{where}: {len(values)} columns where the header has {len(header)}: "
                    "is a delimiter or a line break inside a value?"
                )
            yield where, dict(zip(header, values, strict=True))


def _json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: each line must be a JSON object, got {type(row).__name__}")
        yield where, row


def _data_set(path: str | Path) -> Iterator[tuple[str, Row]]:
    datasets = require("datasets", extra="train")
    folder = Path(path)
    if folder.is_dir():
        table = datasets.load_from_disk(str(folder))
    elif folder.suffix or folder.is_absolute():
        raise ValueError(
            f"{path} is not a file or folder that can be read: give {', '.join(TABLES)} or .txt"
        )
    else:
        name, _, split = str(path).partition(":")
        table = datasets.load_dataset(name, split=split or "train")
    if isinstance(table, dict):
        raise ValueError(
            f"{path} holds several splits, {sorted(table)}: give the folder of one of them"
        )
    features = {
        name: feature.names
        for name, feature in table.features.items()
        if isinstance(feature, datasets.ClassLabel)
    }
    for number, row in enumerate(table):
        named = {
            name: features[name][value] if name in features else value
            for name, value in row.items()
        }
        yield f"{path}, row {number}", named


def _text(row: Row, name: str, where: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"{where}: column {name!r} must hold text, got {type(value).__name__}")
    return value


def _number(value: str, where: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{where}: a regression's label must be a number, got {value!r}") from None


def _sorted(names: set[str]) -> list[str]:
    try:
        return sorted(names, key=float)
    except ValueError:
        return sorted(names)
