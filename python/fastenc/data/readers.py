"""Texts and labels from files: text, TSV, CSV, JSONL (each also gzipped), and Hugging Face datasets."""

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

from fastenc._extras import require

Row = dict[str, Any]
TABLES = (".tsv", ".csv", ".jsonl")
QUOTINGS = ("csv", "none")
# A value in quotes, with quotes doubled inside it: nobody writes that without meaning CSV's quoting.
QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')


@dataclass(frozen=True)
class LabelledData:
    """Texts or pairs of texts with their labels.

    Fields:
        labels: a class index each; without label names a number each; with several labels a text, a row of 0.0 and
            1.0, one for every name. Empty if the labels are to be predicted.
        where: file and line of each text for error messages; may be empty.
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

    A ``.txt`` file holds documents separated by empty lines, a line for each paragraph or sentence. TSV
    (``quoting``: see :func:`numbered_rows`), CSV and JSONL hold a document a row, in ``column`` ("text" if None). A
    folder written by ``datasets``' save_to_disk is read likewise, as is ``name``, ``name:split`` or
    ``name:configuration:split`` on the hub (the split is "train" if not given).
    Raises: ValueError with file and line number for a malformed file.
    """
    return list(iterate_texts(path, column, quoting))


def iterate_texts(
    path: str | Path, column: str | None = None, quoting: str | None = None
) -> Iterator[str]:
    """Like :func:`read_texts`, one document at a time, without keeping it."""
    if kind_of(path) != ".txt":
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
            f"{path} holds no text: give a file with at least one line that is not empty"
        )


class FileTexts:
    """The documents of files, one file after another. Each iteration reads the files again; nothing is kept."""

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
        path: a TSV, CSV or JSONL file, a saved data set's folder, or a hub name as in ``read_texts``.
        text: one column, or two for pairs of texts.
        label: column of the labels.
        label_names: the classes in order, as a training set gave them; None: those found, sorted (as numbers if
            they are numbers).
        regression: labels are numbers to predict.
        multi_label: a text has any number of labels: separated by commas in a table, or a list in JSON.
        quoting: of a TSV file, see :func:`numbered_rows`.
    Raises: ValueError with file and line number: a missing column, a wrong number of columns, bad JSON, a label
        outside ``label_names`` or none at all, the same label in all rows where there are no ``label_names``, not
        UTF-8, no rows.
    """
    if len(text) not in (1, 2):
        raise ValueError(f"text must name one column, or two for pairs, got {list(text)}")
    texts: list[Any] = []
    found: list[tuple[str, Any]] = []
    value_of = _labels if multi_label else _label
    for where, row in numbered_rows(path, [*text, label], quoting):
        parts = tuple(text_of(row, name, where) for name in text)
        texts.append(parts if len(parts) == 2 else parts[0])
        found.append((where, value_of(row, label, where)))
    lines = [where for where, _ in found]
    if regression:
        return LabelledData(texts, [number_of(value, where) for where, value in found], [], lines)
    every = [(where, v) for where, value in found for v in (value if multi_label else [value])]
    names = list(label_names) if label_names is not None else _sorted({v for _, v in every})
    if not names:
        raise ValueError(f"{path}: no row has a label in column {label!r}: is it the right column?")
    if label_names is None and len(names) == 1 and not multi_label:
        raise ValueError(
            f"{path}: every row has the label {names[0]!r} in column {label!r}, so there is nothing to learn: add rows "
            "with another label, or give --label another column"
        )
    index = {name: number for number, name in enumerate(names)}
    for where, value in every:
        if value not in index:
            raise ValueError(
                f"{where}: label {value!r} is not one of the training set's {names}: correct it, or add rows with it "
                "to the training set"
            )
    if multi_label:
        hot = [[float(name in value) for name in names] for _, value in found]
        return LabelledData(texts, hot, names, lines)
    return LabelledData(texts, [index[value] for _, value in found], names, lines)


def read_inputs(
    path: str | Path, columns: Sequence[str] = ("sentence",), quoting: str | None = None
) -> list[Any]:
    """Texts to predict for: a table's columns, or the lines of a text file, empty ones too (as are those of a table
    of one column), so that outputs stay beside them.

    Raises: ValueError as :func:`read_labelled`.
    """
    return list(iterate_inputs(path, columns, quoting))


def iterate_inputs(
    path: str | Path, columns: Sequence[str] = ("sentence",), quoting: str | None = None
) -> Iterator[Any]:
    """:func:`read_inputs`, a text or a tuple of texts at a time."""
    if kind_of(path) == ".txt":
        number = 0
        for number, line in numbered_lines(Path(path)):  # noqa: B007  (read after the loop)
            yield line
        if not number:
            raise ValueError(f"{path} holds no text: give a file with at least one line")
        return
    for where, row in numbered_rows(path, columns, quoting):
        texts = tuple(text_of(row, name, where) for name in columns)
        yield texts if len(columns) > 1 else texts[0]


def in_parts(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of ``size`` consecutive items; the last list may be shorter."""
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


def is_data_set(folder: Path) -> bool:
    """Whether ``datasets``' save_to_disk wrote the folder: one split, or several."""
    return any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def kind_of(path: str | Path) -> str:
    suffixes = [suffix for suffix in Path(path).suffixes if suffix != ".gz"]
    return suffixes[-1] if suffixes else ""


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end). A byte-order mark is dropped."""
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
    """(file and line for error messages, row) of any table, with the columns checked.

    Args:
        quoting: of a TSV file: "csv", values may be in quotes, as pandas writes them; "none", quotes are characters
            like any other; None: they are, but a value that is evidently quoted is an error.
    """
    if quoting not in (None, *QUOTINGS):
        raise ValueError(f"quoting must be one of {', '.join(QUOTINGS)}, got {quoting!r}")
    kind = kind_of(path)
    if kind == ".tsv":
        cells = (
            _csv_cells(Path(path), "\t")
            if quoting == "csv"
            else _tsv_cells(Path(path), check=quoting is None)
        )
        rows = _delimited(Path(path), cells)
    elif kind == ".csv":
        rows = _delimited(Path(path), _csv_cells(Path(path)))
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
        raise ValueError(
            f"{path} holds no rows: give a table with at least one, in .tsv and .csv below the header line"
        )


def _delimited(path: Path, cells: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[str, Row]]:
    """Rows below a header line. An empty list of cells stands for an empty line."""
    header: list[str] = []
    for number, values in cells:
        where = f"{path}, line {number}"
        if not values:
            if len(header) != 1:
                continue
            # Skipping the line would shift the outputs of all later rows.
            values = [""]
        if not header:
            header = values
            if len(set(header)) < len(header):
                raise ValueError(f"{where}: two columns have the same name, got {header}")
        elif len(values) != len(header):
            raise ValueError(
                f"{where}: {len(values)} columns where the header has {len(header)}: "
                "is a delimiter or a line break inside a value?"
            )
        else:
            yield where, dict(zip(header, values, strict=True))


def _tsv_cells(path: Path, check: bool) -> Iterator[tuple[int, list[str]]]:
    for number, line in numbered_lines(path):
        values = line.split("\t") if line else []
        if check and any(map(QUOTED.fullmatch, values)):
            value = next(filter(QUOTED.fullmatch, values))
            raise ValueError(
                f"{path}, line {number}: {value[:60]} is quoted as in CSV: give --quoting csv to take such quotes off, "
                "or --quoting none to keep them as they are"
            )
        yield number, values


def _csv_cells(path: Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """A value in quotes may hold line breaks; the number is that of its row's last line."""
    lines = (line + "\n" for _, line in numbered_lines(path))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    begin = 1
    try:
        for values in reader:
            yield reader.line_num, values
            begin = reader.line_num + 1
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            raise ValueError(
                f"{path}: a quote in the row that begins in line {begin} is opened and never closed: close it, or "
                'write a quote inside a value as ""'
            ) from error
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error


def _json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in numbered_lines(path):
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
    if Path(path).is_file():
        raise ValueError(
            f"{path}: texts are read from {', '.join(TABLES)} and .txt files, got another kind: give one of them, or a "
            "data set's folder. Words in columns (.conll, .conllu) are for the tasks token-classification and "
            "span-ner, SQuAD's .json is for question-answering"
        )
    if Path(path).is_absolute() and not Path(path).is_dir():
        raise ValueError(f"{path} is neither a file nor a folder: check the path")
    table = _load_data_set(path)
    if isinstance(table, dict):
        raise ValueError(
            f"{path} holds several splits, {sorted(table)}: give the folder of one of them"
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
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"{where}: column {name!r} must hold text, got {type(value).__name__}")
    return value


def _label(row: Row, name: str, where: str) -> str:
    value = row[name]
    if value == "" or not isinstance(value, str | int | float):
        raise ValueError(
            f"{where}: column {name!r} must hold a label, got {value!r}: leave out what has none"
        )
    return str(value)


def _labels(row: Row, name: str, where: str) -> set[str]:
    """The labels of a list, or of text separated by commas. There may be none."""
    value = row[name]
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str | int) for part in parts):
        raise ValueError(
            f"{where}: column {name!r} must hold labels, a list or text with commas between, got {value!r}"
        )
    return {str(part).strip() for part in parts} - {""}


def number_of(value: str, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):  # null in JSON
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"{where}: a regression's label or a score must be a number, got {value!r}"
        )
    return number


def _sorted(names: set[str]) -> list[str]:
    try:
        return sorted(names, key=lambda name: (float(name), name))
    except ValueError:
        return sorted(names)
