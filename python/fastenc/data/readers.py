"""Reads texts and labels from text, TSV, CSV and JSONL files (also gzipped) and from Hugging Face datasets."""

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fastenc._base.extras import require

Row = dict[str, Any]
TABLES = (".tsv", ".csv", ".jsonl")
QUOTINGS = ("csv", "none")
LONGEST_CELL = 2**31 - 1  # characters; csv's own limit is below a long document's
# A value in quotes with doubled quotes inside: it can only be meant as CSV's quoting.
QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')
# JSON may write a character beyond U+FFFF as a pair of these.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class MissingColumn(ValueError):
    """A table, or a text file, does not have a column that is to be read."""


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


def is_data_set(folder: Path) -> bool:
    """Whether ``datasets``' save_to_disk wrote the folder, with one split or several."""
    return any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def file_type_of(path: str | Path) -> str:
    """The file's format: its last suffix other than ``.gz``, such as ".tsv"; "" if it has none."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix != ".gz"]
    return suffixes[-1] if suffixes else ""


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its line break) of a text file. A byte-order mark is dropped.

    Raises: ValueError with file and line if the path is no file, or its text is not UTF-8 or is damaged gzip.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file: check the path")
    number = 0
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text.rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: not UTF-8 ({error}): convert the file"
            ) from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(
                f"{path}, after line {number}: damaged or not gzip ({error}): copy the file again"
            ) from error


def numbered_rows(
    path: str | Path, columns: Sequence[str], quoting: str | None = None
) -> Iterator[tuple[str, Row]]:
    """(file and line for error messages, row) of any table or data set that has these columns.

    Args:
        quoting: what a double quote means in a TSV file. "csv": values may be in quotes, as pandas writes them.
            "none": it is a character like any other. None: as "none", but a value that is clearly quoted is an error.
    Raises: ValueError for a missing column, a malformed file or one without rows.
    """
    if quoting not in (None, *QUOTINGS):
        raise ValueError(
            f"quoting must be one of {', '.join(QUOTINGS)}, got {quoting!r}: give one of them"
        )
    file_type = file_type_of(path)
    if file_type == ".tsv":
        cells = (
            _csv_cells(Path(path), "\t")
            if quoting == "csv"
            else _tsv_cells(Path(path), check=quoting is None)
        )
        rows = _delimited(Path(path), cells)
    elif file_type == ".csv":
        rows = _delimited(Path(path), _csv_cells(Path(path)))
    elif file_type == ".jsonl":
        rows = _json_lines(Path(path))
    elif file_type == ".txt":
        raise MissingColumn(
            f"{path}: a text file has no columns: give {', '.join(TABLES)} or a data set"
        )
    else:
        rows = _data_set(path)
    empty = True
    for where, row in rows:
        missing = [name for name in columns if name not in row]
        if missing:
            raise MissingColumn(
                f"{where}: there must be a column {missing[0]!r}, got {list(row)}: name one of these columns"
            )
        empty = False
        yield where, row
    if empty:
        raise ValueError(
            f"{path} must hold rows, got none: give a table with at least one row, in .tsv and .csv below a header line"
        )


def _delimited(path: Path, cells: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[str, Row]]:
    """The rows below the header line, as dictionaries. An empty list of cells stands for an empty line."""
    header: list[str] = []
    for number, values in cells:
        where = f"{path}, line {number}"
        if not values:
            if len(header) != 1:
                continue
            # In a table of one column, skipping the line would shift the outputs of all later rows.
            values = [""]
        if not header:
            header = values
            if len(set(header)) < len(header):
                raise ValueError(
                    f"{where}: columns must have different names, got {header}: rename one"
                )
        elif len(values) != len(header):
            raise ValueError(
                f"{where}: a row must have the header's {len(header)} columns, got {len(values)}: remove delimiters "
                "and line breaks inside values, or quote them in .csv"
            )
        else:
            yield where, dict(zip(header, values, strict=True))


def _tsv_cells(path: Path, check: bool) -> Iterator[tuple[int, list[str]]]:
    for number, line in numbered_lines(path):
        values = line.split("\t") if line else []
        if check and any(map(QUOTED.fullmatch, values)):
            value = next(filter(QUOTED.fullmatch, values))
            raise ValueError(
                f'{path}, line {number}: {value[:60]} is quoted as in CSV: give quoting="csv" to remove such quotes, '
                'or quoting="none" to keep them'
            )
        yield number, values


def _csv_cells(path: Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """(number of the row's last line, cells) of each row. A value in quotes may contain line breaks."""
    lines = (line + "\n" for _, line in numbered_lines(path))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    begin = 1
    try:
        while (values := _next_row(reader)) is not None:
            yield reader.line_num, values
            begin = reader.line_num + 1
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            raise ValueError(
                f"{path}: the row that begins in line {begin} opens a quote and never closes it: close it, or write a "
                'quote inside a value as ""'
            ) from error
        raise ValueError(
            f"{path}, line {reader.line_num}: not valid CSV ({error}): correct the line"
        ) from error


def _next_row(reader: Iterator[list[str]]) -> list[str] | None:
    """The next row, or None. csv has one limit for all readers of the process, so it is set for this row only."""
    limit = csv.field_size_limit(LONGEST_CELL)
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(limit)


def _json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON ({error}): correct the line") from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{where}: each line must be a JSON object, got {type(row).__name__}: write {{column: value, …}}"
            )
        if SURROGATE.search(line):
            _check_whole_characters(row, where)
        yield where, row


def _check_whole_characters(row: Row, where: str) -> None:
    """Raises: ValueError for half of a surrogate pair, as in a text that was cut inside an emoji."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(
            f"{where}: texts must consist of whole characters, got {half}, half of one: remove it"
        ) from error


def _data_set(path: str | Path) -> Iterator[tuple[str, Row]]:
    if Path(path).is_file():
        raise ValueError(
            f"{path}: texts are read from {', '.join(TABLES)} and .txt files, got another format: give one of these, "
            "or a data set's folder. Words in columns (.conll, .conllu) are for the tasks token-classification and "
            "span-ner. SQuAD's .json is for question-answering"
        )
    if Path(path).is_absolute() and not Path(path).is_dir():
        raise ValueError(f"{path} is neither a file nor a folder: check the path")
    table = _load_data_set(path)
    if isinstance(table, dict):
        raise ValueError(
            f"{path} must hold one split, got {sorted(table)}: give the folder of one of them"
        )
    names = {
        column: feature.names
        for column, feature in table.features.items()
        if hasattr(feature, "names")
    }
    for number, row in enumerate(table):
        for column in names:
            # -1 means "not labelled".
            index = row[column]
            row[column] = None if index is None or index < 0 else names[column][index]
        yield f"{path}, row {number}", row


def _load_data_set(path: str | Path) -> Any:
    datasets = require("datasets", extra="train")
    try:
        if Path(path).is_dir():
            return datasets.load_from_disk(str(path))
        name, *rest = str(path).split(":")
        *configuration, split = rest or ["train"]
        return datasets.load_dataset(name, *configuration, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is neither a file, nor a folder written by save_to_disk, nor a data set on the hub "
            f"that can be loaded ({error}): check the path or name"
        ) from error


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
