"""Reads sentences of tagged words from files in columns, CoNLL (a word a line) and CoNLL-U, and from data sets."""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from fastenc.data.rows import file_type_of, is_data_set, numbered_lines
from fastenc.data.word_data_sets import names_data_set, rows_of_words
from fastenc.text.characters import JOINERS, marks
from fastenc.text.tags import SCHEMES, convert, every_tag, scheme_of

CONLLU_WORD, CONLLU_TAG = 2, 4  # FORM and UPOS
NOT_COLUMNS = (".csv", ".json", ".jsonl")
Rows = list[tuple[int, list[str]]]  # (line number, cells) of each word of a sentence


class Sentence(NamedTuple):
    """A sentence of words.

    Fields:
        tags: one for each word; empty if they are to be predicted.
        lines: line number of each word in the file.
        text: the running text.
        starts: index in ``text`` of each word's first character.
    """

    words: list[str]
    tags: list[str]
    lines: list[int]
    text: str
    starts: list[int]


@dataclass(frozen=True)
class TaggedData:
    """Sentences of tagged words.

    Fields:
        label_names: the tags that a word may have; empty if the tags are to be predicted.
        path: the file that the sentences come from.
    """

    sentences: list[Sentence]
    label_names: list[str]
    path: str = "data"

    def __len__(self) -> int:
        return len(self.sentences)


def sentence(
    words: Sequence[str], tags: Sequence[str] = (), lines: Sequence[int] | None = None
) -> Sentence:
    """A sentence whose running text has one space between words.

    Args:
        lines: line number of each word; None: 1, 2, 3, …
    """
    starts = [0, *accumulate(len(word) + 1 for word in words)][: len(words)]
    numbers = list(range(1, len(words) + 1) if lines is None else lines)
    return Sentence(list(words), list(tags), numbers, " ".join(words), starts)


def read_tagged(
    path: str | Path,
    word_column: int | None = None,
    tag_column: int | None = None,
    label_names: Sequence[str] | None = None,
    tag_scheme: str | None = None,
) -> TaggedData:
    """Tagged sentences from a file in columns, or from a Hugging Face data set.

    A line holds a word and its tags. They are separated by tabs or, in a line without tabs, by spaces. An empty line or
    -DOCSTART- ends a sentence. A line before a sentence's first word is a comment if it begins with "# ", has no tab
    and has another number of columns than the other lines. In a ``.conllu`` file every line that begins with # is a
    comment, and the lines of multiword tokens (1-2) and empty nodes (1.1) are skipped.

    A data set is a folder of ``save_to_disk``, or ``name``, ``name:split`` or ``name:configuration:split`` on the hub.
    Its column 1 is ``tokens`` or ``words``, a list of words. The columns after it have a tag for each word; those whose
    name contains "tag" or "label" come last.

    Args:
        word_column, tag_column: from 1. None: the first and the last; FORM and UPOS of a ``.conllu`` file.
        label_names: the tags in the training set's order. None: those found; for entity tags, also every other tag of
            the scheme for each entity type found.
        tag_scheme: "iob2" or "bioes": entity tags are converted to this scheme. None: tags are not converted.
    Warns: without ``tag_scheme``, if some tags are IOB2 or BIOES and others are neither.
    Raises: ValueError with file and line for a wrong number of columns, one column for both words and tags, a missing
        word or tag, texts in place of words in a ``.tsv`` file, a tag that is not in ``label_names``, a tag that is
        neither IOB2 nor BIOES if ``tag_scheme`` is given, text that is not UTF-8, and a file without sentences.
    """
    if tag_scheme is not None and tag_scheme not in SCHEMES:
        raise ValueError(f"tag_scheme must be one of {SCHEMES}, got {tag_scheme!r}")
    sentences = []
    for rows in sentence_rows(path):
        word, tag = _columns(path, rows, word_column, tag_column)
        words, tags = _words(path, rows, word), _cells(path, rows, tag, "tag")
        sentences.append(sentence(words, tags, [number for number, _ in rows]))
    if not sentences:
        raise ValueError(f"{path} holds no sentences: give a file with a word and its tag a line")
    if tag_scheme is None:
        _warn_of_mixed_tags(path, sentences)
    else:
        _check_entity_tags(path, sentences)
        sentences = [each._replace(tags=convert(each.tags, tag_scheme)) for each in sentences]
    names = label_names
    if names is None:
        names = every_tag(tag for each in sentences for tag in each.tags)
    data = TaggedData(sentences, list(names), str(path))
    check_tags(data, names)
    return data


def check_tags(data: TaggedData, label_names: Sequence[str]) -> None:
    """Raises: ValueError with file and line for a word whose tag is missing or not in ``label_names``."""
    known = set(label_names)
    for each in data.sentences:
        if len(each.tags) != len(each.words):
            raise ValueError(
                f"{place_of(data.path, each.lines[0] if each.lines else 1)}: {len(each.tags)} tags for the "
                f"{len(each.words)} words {each.text[:60]!r}: give one tag a word"
            )
        for word, tag, line in zip(each.words, each.tags, each.lines, strict=True):
            if tag not in known:
                raise ValueError(
                    f"{place_of(data.path, line)}: the tag {tag!r} of the word {word!r} is not one of the training "
                    f"set's {list(label_names)}: correct it, or add sentences with it to the training set"
                )


def _check_entity_tags(path: str | Path, sentences: Sequence[Sentence]) -> None:
    """Raises: ValueError with file and line for a tag that is neither IOB2 nor BIOES."""
    if other := _first_other_tag(path, sentences):
        raise ValueError(
            f"{other} is neither an IOB2 nor a BIOES tag, such as B-PER or O: correct it (from BILOU, write L- as E- "
            "and U- as S-), or give tag_column the column of the entities"
        )


def _warn_of_mixed_tags(path: str | Path, sentences: Sequence[Sentence]) -> None:
    """Warn if some tags are entity tags and others are not: then all are read as plain tags, like parts of speech."""
    tags = {tag for each in sentences for tag in each.tags}
    if not any(scheme_of([tag]) for tag in tags):
        return
    if other := _first_other_tag(path, sentences):
        # Not an error: some parts of speech look like entity tags, such as S----3MS2- (Arabic), and some data sets tag
        # the later subwords of a word with X.
        warnings.warn(
            f"{other} is neither an IOB2 nor a BIOES tag, but other tags are. No tag is read as an entity's. If the "
            "column holds entities, correct this tag; a word outside entities has the tag O",
            stacklevel=3,
        )


def _first_other_tag(path: str | Path, sentences: Sequence[Sentence]) -> str | None:
    """Names the first tag that is neither IOB2 nor BIOES, with file and line; None if there is none."""
    tags = {tag for each in sentences for tag in each.tags}
    others = {tag for tag in tags if tag != "O" and scheme_of([tag]) is None}
    for each in sentences:
        for word, tag, line in zip(each.words, each.tags, each.lines, strict=True):
            if tag in others:
                return f"{place_of(path, line)}: the tag {tag!r} of the word {word!r}"
    return None


def read_words(path: str | Path, word_column: int | None = None) -> TaggedData:
    """Sentences to tag, from a file in columns or a ``.txt`` file.

    Each line of a ``.txt`` file is a sentence. It is cut into words and punctuation marks. An empty line is a sentence
    without words.

    Args:
        word_column: as in :func:`read_tagged`.
    Raises: ValueError as :func:`read_tagged`.
    """
    return TaggedData(list(iterate_words(path, word_column)), [], str(path))


def iterate_words(path: str | Path, word_column: int | None = None) -> Iterator[Sentence]:
    """The sentences of :func:`read_words`, one at a time. If the file has no words, the error is raised at its end."""
    empty = True
    if file_type_of(path) == ".txt":
        for number, line in numbered_lines(Path(path)):
            each = cut_into_words(line, number)
            empty = empty and not each.words
            yield each
    else:
        column = _usual_word_column(path) if word_column is None else word_column
        for rows in sentence_rows(path):
            empty = False
            yield sentence(_words(path, rows, column), (), [number for number, _ in rows])
    if empty:
        raise ValueError(f"{path} holds no words: give a file with a word a line, or .txt")


def cut_into_words(text: str, line: int) -> Sentence:
    """The words and punctuation marks of a text, which is on this line of its file."""
    matches = list(_word().finditer(text))
    words, starts = [m.group() for m in matches], [m.start() for m in matches]
    return Sentence(words, [], [line] * len(words), text, starts)


@cache
def _word() -> re.Pattern[str]:
    """A word or a punctuation mark, each with the combining marks and joiners after its characters.

    Source: Unicode Technical Standard 18, annex C, word characters.
    """
    following = marks() + JOINERS
    return re.compile(rf"\w[\w{following}]*|[^\w\s][{following}]*")


def sentence_of(value: object, index: int) -> Sentence:
    """The sentence of a Python value, the input with this index: a text, which is cut into words, or a list of words.

    Raises: ValueError for anything else.
    """
    if isinstance(value, str):
        return cut_into_words(value, index + 1)
    if not isinstance(value, list | tuple) or not all(isinstance(w, str) and w for w in value):
        raise ValueError(
            f"input {index} must be a text or a list of words that are not empty, got {value!r}: correct it"
        )
    return sentence(list(value), (), [index + 1] * len(value))


def sentence_rows(path: str | Path) -> Iterator[Rows]:
    """The sentences of a file or a data set, as numbered rows of cells."""
    return rows_of_words(path) if names_data_set(path) else numbered_blocks(path)


def place_of(path: str | Path, number: int) -> str:
    """The line of a file, or the row of a data set, for messages."""
    is_from_python = path == TaggedData.path
    unit = "row" if names_data_set(path) and not is_from_python else "line"
    return f"{path}, {unit} {number}"


def numbered_blocks(path: str | Path) -> Iterator[Rows]:
    """The sentences of a file, as numbered rows of cells."""
    file_type, data_set = file_type_of(path), is_data_set(Path(path))
    if data_set or file_type in NOT_COLUMNS:
        given = "data set" if data_set else f"{file_type} file"
        raise ValueError(
            f"{path}: words are read from files with columns between tabs or spaces, such as .conll, .conllu or .tsv, "
            f"got a {given}: give a file with a word and its tag on each line, and an empty line after each "
            "sentence. Texts to predict for may be .txt; .jsonl is for the task span-ner"
        )
    conllu = file_type == ".conllu"
    rows: Rows = []
    width, first = 0, 0
    for number, line in numbered_lines(Path(path)):
        if not line.strip() or line.startswith("-DOCSTART-"):
            if rows:
                yield rows
            rows = []
            continue
        cells = line.split("\t") if "\t" in line else re.split(" +", line.strip(" "))
        if conllu:
            skipped = line.startswith("#") or bool(re.fullmatch(r"\d+[-.]\d+", cells[0]))
        else:
            # A line that begins with "# " may also hold the word "#" and its tag.
            comment = line.startswith("# ") and "\t" not in line and not rows
            skipped = comment and len(cells) != width
        if skipped:
            continue
        width, first = width or len(cells), first or number
        if len(cells) != width:
            raise ValueError(
                f"{path}, line {number}: each line must have {width} columns as line {first} has, got {len(cells)}: "
                "add what is missing, or separate columns by tabs if words contain spaces"
            )
        rows.append((number, cells))
    if rows:
        yield rows


def _columns(
    path: str | Path, rows: Rows, word_column: int | None, tag_column: int | None
) -> tuple[int, int]:
    """The columns of words and tags, from 1."""
    number, cells = rows[0]
    word = _usual_word_column(path) if word_column is None else word_column
    if (tag := tag_column) is None:
        tag = CONLLU_TAG if file_type_of(path) == ".conllu" else len(cells)
    if word == tag:
        raise ValueError(
            f"{place_of(path, number)}: words and tags must be in two columns, got column {word} of {len(cells)} for "
            "both: give a file with a word and its tag on each line, or give word_column and tag_column other "
            "numbers"
        )
    return word, tag


def _usual_word_column(path: str | Path) -> int:
    return CONLLU_WORD if file_type_of(path) == ".conllu" else 1


def _words(path: str | Path, rows: Rows, column: int) -> list[str]:
    words = _cells(path, rows, column, "word")
    spaced = [index for index, word in enumerate(words) if " " in word]
    # A .tsv file may be a table of texts instead, which would be read as one long sentence. Most of its cells contain
    # spaces, which words rarely do. A short sentence is no evidence.
    if file_type_of(path) == ".tsv" and len(words) > 3 and 2 * len(spaced) >= len(words):
        number, text = rows[spaced[0]][0], words[spaced[0]]
        raise ValueError(
            f"{place_of(path, number)}: column {column} must hold one word on each line, got the text {text[:60]!r}: "
            "give words (in a .conll file if they contain spaces), or texts to predict for as .txt"
        )
    return words


def _cells(path: str | Path, rows: Rows, column: int, what: str) -> list[str]:
    number, cells = rows[0]
    if not 1 <= column <= len(cells):
        raise ValueError(
            f"{place_of(path, number)}: {what}_column must be from 1 to {len(cells)}, the number of columns here, "
            f"got {column}: give one of them"
        )
    for number, cells in rows:
        if not cells[column - 1]:
            raise ValueError(
                f"{place_of(path, number)}: column {column} must hold a {what}, got nothing: fill it in, or leave the "
                "whole line empty to end the sentence"
            )
    return [cells[column - 1] for _, cells in rows]
