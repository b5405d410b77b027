"""Reads texts and labels from text, TSV, CSV and JSONL files (also gzipped) and from Hugging Face datasets."""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fastenc.data.rows import Row, file_type_of, numbered_lines, numbered_rows


@dataclass(frozen=True)
class LabelledData:
    """Texts or pairs of texts with their labels.

    Fields:
        labels: for each text a class index; for regression a number; for multi-label a row of 0.0 and 1.0, one for each
            name. Empty if the labels are to be predicted.
        label_names: name of each class; empty for regression.
        where: file and line of each text, for error messages; may be empty.
    """

    texts: list[str] | list[tuple[str, str]]
    labels: list[int] | list[float] | list[list[float]]
    label_names: list[str]
    where: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.texts)


def read_texts(
    path: str | Path, column: str | None = None, quoting: str | None = None
) -> list[str]:
    """The documents of a file or data set.

    A ``.txt`` file holds documents separated by empty lines; each line is a paragraph or sentence. TSV, CSV and JSONL
    files hold one document in each row. So do data sets: a folder written by ``datasets``' save_to_disk, or a data set
    on the hub, named ``name``, ``name:split`` or ``name:configuration:split`` (the default split is "train").

    Args:
        column: name of the documents' column; None: "text".
        quoting: of a TSV file, see :func:`numbered_rows`.
    Raises: ValueError with file and line number for a malformed file or one without text.
    """
    return list(iterate_texts(path, column, quoting))


def iterate_texts(
    path: str | Path, column: str | None = None, quoting: str | None = None
) -> Iterator[str]:
    """The documents of :func:`read_texts`, one at a time; they are not kept in memory."""
    if file_type_of(path) != ".txt":
        name = column or "text"
        rows = numbered_rows(path, [name], quoting)
        yield from (text_of(row, name, where) for where, row in rows)
        return
    lines: list[str] = []
    empty = True
    for _, line in numbered_lines(Path(path)):
        if line.strip():
            lines.append(line.strip())
            empty = False
        elif lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)
    if empty:
        raise ValueError(
            f"{path} must hold text, got only empty lines: give a file with at least one line that is not empty"
        )


class FileTexts:
    """The documents of files, one file after another. Each iteration reads the files again; no text is kept."""

    def __init__(
        self, paths: Iterable[str | Path], column: str | None = None, quoting: str | None = None
    ):
        self.paths, self.column, self.quoting = list(paths), column, quoting

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            yield from iterate_texts(path, self.column, self.quoting)


def read_labelled(
    path: str | Path,
    text: Sequence[str] = ("sentence",),
    label: str = "label",
    label_names: Sequence[str] | None = None,
    regression: bool = False,
    multi_label: bool = False,
    quoting: str | None = None,
) -> LabelledData:
    """Labelled texts from a table.

    Args:
        path: a TSV, CSV or JSONL file, a saved data set's folder, or a data set on the hub, as in ``read_texts``.
        text: name of one column, or of two for pairs of texts.
        label: name of the labels' column.
        label_names: the classes in the training set's order; None: those found, sorted (by value if all are numbers).
        regression: the labels are numbers to predict.
        multi_label: a text has any number of labels, as a list in JSON or separated by commas in other tables.
        quoting: of a TSV file, see :func:`numbered_rows`.
    Warns: without ``label_names``, if two labels differ only by case, or by spaces around them.
    Raises: ValueError with file and line number for a missing column, a wrong number of columns, bad JSON, a missing
        label, a label that is not in ``label_names``, the same label in all rows if ``label_names`` is None, text that
        is not UTF-8, and a file without rows.
    """
    if len(text) not in (1, 2):
        raise ValueError(
            f"text must name one column, or two for pairs of texts, got {list(text)}: name one or two"
        )
    texts: list[Any] = []
    labelled: list[tuple[str, Any]] = []
    value_of = _labels if multi_label else _label
    for where, row in numbered_rows(path, [*text, label], quoting):
        parts = tuple(text_of(row, name, where) for name in text)
        texts.append(parts if len(parts) == 2 else parts[0])
        labelled.append((where, value_of(row, label, where)))
    lines = [where for where, _ in labelled]
    if regression:
        return LabelledData(
            texts, [number_of(value, where) for where, value in labelled], [], lines
        )
    singles = [(where, v) for where, value in labelled for v in (value if multi_label else [value])]
    names = list(label_names) if label_names is not None else _sorted({v for _, v in singles})
    if not names:
        raise ValueError(
            f"{path}: column {label!r} must hold labels, got none in any row: give label= another column"
        )
    if label_names is None and len(names) == 1 and not multi_label:
        raise ValueError(
            f"{path}: there must be at least two different labels to learn, got {names[0]!r} in every row of column "
            f"{label!r}: add rows with another label, or give label= another column"
        )
    if label_names is None:
        _warn_of_like_names(path, names)
    index = {name: number for number, name in enumerate(names)}
    for where, value in singles:
        if value not in index:
            raise ValueError(
                f"{where}: label {value!r} is not one of the training set's {names}: correct it, or add rows with it "
                "to the training set"
            )
    if multi_label:
        multi_hot = [[float(name in value) for name in names] for _, value in labelled]
        return LabelledData(texts, multi_hot, names, lines)
    return LabelledData(texts, [index[value] for _, value in labelled], names, lines)


def read_inputs(
    path: str | Path, columns: Sequence[str] = ("sentence",), quoting: str | None = None
) -> list[Any]:
    """Texts to predict for: the rows of a table's columns, or the lines of a ``.txt`` file.

    Empty lines of a ``.txt`` file or of a table with one column are inputs too, so that line n of the output belongs to
    line n of the input.

    Args:
        columns: one name, or two for pairs of texts.
        quoting: of a TSV file, see :func:`numbered_rows`.
    Returns: a text, or a tuple of texts if there are several columns, for each row.
    Raises: ValueError as :func:`read_labelled`.
    """
    return list(iterate_inputs(path, columns, quoting))


def iterate_inputs(
    path: str | Path, columns: Sequence[str] = ("sentence",), quoting: str | None = None
) -> Iterator[Any]:
    """The inputs of :func:`read_inputs`, one at a time."""
    if file_type_of(path) == ".txt":
        number = 0
        for number, line in numbered_lines(Path(path)):  # noqa: B007  (read after the loop)
            yield line
        if not number:
            raise ValueError(f"{path} must hold text, got no line: give a file with at least one")
        return
    for where, row in numbered_rows(path, columns, quoting):
        texts = tuple(text_of(row, name, where) for name in columns)
        yield texts if len(columns) > 1 else texts[0]


def input_rows(
    path: str | Path, column: str = "sentence", quoting: str | None = None
) -> Iterator[tuple[str, Row]]:
    """(file and line for error messages, row with all columns) of each text of :func:`read_inputs`.

    The lines of a ``.txt`` file are rows with this column alone.
    """
    if file_type_of(path) == ".txt":
        for number, line in enumerate(iterate_inputs(path), start=1):
            yield f"{path}, line {number}", {column: line}
        return
    for where, row in numbered_rows(path, [column], quoting):
        text_of(row, column, where)
        yield where, row


def in_parts(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of ``size`` consecutive items; the last list may be shorter."""
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part


def text_of(row: Row, name: str, where: str) -> str:
    """The text in a column. Raises: ValueError for another type."""
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: column {name!r} must hold text, got {type(value).__name__}: correct it, or name another column"
        )
    return value


def _label(row: Row, name: str, where: str) -> str:
    value = row[name]
    missing = isinstance(value, float) and math.isnan(value)
    if missing or not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError(
            f"{where}: column {name!r} must hold a label, got {value!r}: leave out rows without a label"
        )
    return str(value)


def _labels(row: Row, name: str, where: str) -> set[str]:
    """The labels of a list, or of text separated by commas. There may be none."""
    value = row[name]
    labels = value.split(",") if isinstance(value, str) else value
    if not isinstance(labels, list) or not all(isinstance(label, str | int) for label in labels):
        raise ValueError(
            f"{where}: column {name!r} must hold labels, as a list or as text with commas between them, got {value!r}: "
            "correct it"
        )
    return {str(label).strip() for label in labels} - {""}


def _warn_of_like_names(path: str | Path, names: Sequence[str]) -> None:
    """Warn of two labels that differ only by case, or by spaces around them. Each is a class of its own."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.strip().casefold(), name)
        if other != name:
            warnings.warn(
                f"{path}: the labels {other!r} and {name!r} differ by case or spaces alone and are two classes. If "
                "they are one, write them alike",
                stacklevel=3,
            )
            return


def number_of(value: str, where: str) -> float:
    """A finite number from a cell. Raises: ValueError for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):  # null in JSON
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"{where}: a label of a regression or a score must be a number, got {value!r}: correct it or leave out the "
            "row"
        )
    return number


def _sorted(names: set[str]) -> list[str]:
    """By value if all names are numbers, else by character."""
    try:
        return sorted(names, key=lambda name: (float(name), name))
    except ValueError:
        return sorted(names)
