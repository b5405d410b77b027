"""The rows of tables and data sets, with the place of each for messages."""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
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


def is_data_set(folder: Path) -> bool:
    """Whether ``datasets``' save_to_disk wrote the folder, with one split or several."""
    return any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def file_type_of(path: str | Path) -> str:
    """The file's format: its last suffix other than ``.gz``, such as ".tsv"; "" if it has none."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix != ".gz"]
    return suffixes[-1] if suffixes else ""


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its line break) of a text file. A byte-order mark is dropped.

    Raises: ValueError with file and line if the path is no file, its text is not UTF-8 or is damaged gzip, or its only
        line breaks are carriage returns.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file: check the path")
    number = 0
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if number == 1 and not text.endswith("\n") and "\r" in text.rstrip("\r"):
                    raise ValueError(
                        f"{path}: lines must end with a line feed, got only carriage returns: replace them by line "
                        "feeds"
                    )
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
        except (ValueError, RecursionError) as error:  # also too many digits, too many brackets
            raise ValueError(f"{where}: not valid JSON ({error}): correct the line") from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{where}: each line must be a JSON object, got {type(row).__name__}: write {{column: value, …}}"
            )
        if SURROGATE.search(line):
            check_whole_characters(row, where)
        yield where, row


def check_whole_characters(value: object, where: str) -> None:
    """Raises: ValueError for half of a surrogate pair, as in a text that was cut inside an emoji.

    ``value``: a text, or lists and dictionaries of texts.
    """
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
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
            "span-ner, SQuAD's .json for question-answering"
        )
    if Path(path).is_absolute() and not Path(path).is_dir():
        raise ValueError(f"{path} is neither a file nor a folder: check the path")
    table = _load_data_set(path)
    if isinstance(table, dict):
        raise ValueError(
            f"{path} must hold one split, got {sorted(table)}: give the folder of one of them"
        )
    names = {}
    for column, feature in table.features.items():
        of_class = getattr(feature, "feature", feature)  # a list's, for several labels a row
        if hasattr(of_class, "names"):
            names[column] = of_class.names
    for number, row in enumerate(table):
        for column in names:
            row[column] = _class_names(row[column], names[column])
        yield f"{path}, row {number}", row


def _class_names(value: Any, names: Sequence[str]) -> Any:
    """The name of a class by its number, or those of a list of numbers. None for -1, which means "not labelled"."""
    if isinstance(value, list):
        return [_class_names(each, names) for each in value]
    return None if value is None or value < 0 else names[value]


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
