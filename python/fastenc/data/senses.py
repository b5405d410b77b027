"""Reads words that are labelled with senses, from tables (one word a row) and all-words files in columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

import torch

from fastenc._base.progress import progress_bar
from fastenc.data.columns import numbered_blocks
from fastenc.data.readers import text_of
from fastenc.data.rows import TABLES, file_type_of, numbered_lines, numbered_rows
from fastenc.data.words import SENTENCES_AT_ONCE, check_room
from fastenc.packing import ModelArguments, pack_sequences
from fastenc.text.special_tokens import special_tokens
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.tokenizers import ids_and_starts, tokenizer_for_words

TABLE_COLUMNS = ("word", "index", "sentence")
WORD, LEMMA, POS = 0, 1, 2  # columns of an all-words file
UNTAGGED = ("-", "_", "")  # cells that mean "no sense" or "no lemma"
# Numbers, prepositions, auxiliaries and particles, whose tags begin like those of nouns, adjectives and adverbs.
OTHER_PARTS = ("NUM", "ADP", "AUX", "RP")


class Target(NamedTuple):
    """A word whose sense is to be learnt or predicted.

    Fields:
        sentence: index of the sentence in the data.
        word: index of the word in the sentence.
        lemma: the key by which its senses are looked up, such as "bank" or "bank.n".
        senses: its correct senses; empty if they are to be predicted.
        where: file and line.
    """

    sentence: int
    word: int
    lemma: str
    senses: tuple[str, ...]
    where: str


@dataclass(frozen=True)
class SenseData:
    """Sentences as words, and the targets among them."""

    sentences: list[list[str]]
    targets: list[Target]
    path: str = "data"

    def __len__(self) -> int:
        return len(self.targets)


def read_senses(
    path: str | Path, sense: str = "sense", sense_column: int | None = None, labelled: bool = True
) -> SenseData:
    """Targets from a table or from a file in columns. A ``.tsv`` file is a table if its header has a table's columns.

    - A table (.tsv, .csv, .jsonl) has one target in each row, in the columns ``word``, ``index`` (of the word in the
      sentence, from 0), ``sentence`` (words with spaces between them) and the sense. The lemma is ``word``.
    - A file in columns has one word on each line: word (the words of a multiword expression are joined by _), lemma,
      part of speech (Penn or universal) and senses. Several senses have ";" between them, "-" means none. An empty line
      ends a sentence, "# " begins a comment. The lemma of a target contains its part of speech, as in bank.n.

    Args:
        sense: name of a table's sense column.
        sense_column: sense column of a file in columns, from 1; None: the last.
        labelled: True: the targets are the words with a sense. False: they are every row of a table, and every noun,
            verb, adjective and adverb of a file in columns.
    Raises: ValueError with file and line for a missing column, a word that is not in its sentence, a part of speech
        that is a number or has spaces, and a file without targets.
    """
    data = (
        _read_table(path, sense, labelled)
        if _is_table(path)
        else _read_columns(path, sense_column, labelled)
    )
    if not data.targets:
        raise ValueError(
            f"{path} must have a word with a sense, got none: give a file with labelled words, or sense_column the "
            "number of another column"
        )
    return data


def _is_table(path: str | Path) -> bool:
    if file_type_of(path) == ".tsv":  # a table or a file in columns
        _, header = next(numbered_lines(Path(path)), (0, ""))
        return set(TABLE_COLUMNS) <= set(header.split("\t"))
    return file_type_of(path) in TABLES


def _read_table(path: str | Path, sense: str, labelled: bool) -> SenseData:
    columns = (*TABLE_COLUMNS, *((sense,) if labelled else ()))
    sentences: list[list[str]] = []
    targets: list[Target] = []
    for where, row in numbered_rows(path, columns, "none"):
        words = text_of(row, "sentence", where).split()
        index = str(row["index"])
        if not index.isdecimal() or int(index) >= len(words):
            raise ValueError(
                f"{where}: the word {row['word']!r} is not in the sentence: index must be from 0 to "
                f"{len(words) - 1}, got {index}"
            )
        senses = (text_of(row, sense, where),) if labelled else ()
        if senses == ("",):
            raise ValueError(
                f"{where}: column {sense!r} must hold a sense, got nothing: leave out rows without a sense"
            )
        targets.append(Target(len(sentences), int(index), str(row["word"]), senses, where))
        sentences.append(words)
    return SenseData(sentences, targets, str(path))


def _read_columns(path: str | Path, sense_column: int | None, labelled: bool) -> SenseData:
    sentences: list[list[str]] = []
    targets: list[Target] = []
    for rows in numbered_blocks(path):
        number, cells = rows[0]
        column = (len(cells) if sense_column is None else sense_column) - 1
        if len(cells) < 3 or not 0 <= column < len(cells) or (labelled and column <= POS):
            raise ValueError(
                f"{path}, line {number}: a line must hold word, lemma, part of speech and sense, got {len(cells)} "
                f"columns and sense column {column + 1}: give an all-words file, or sense_column another number"
            )
        for word, (number, cells) in enumerate(rows):
            if cells[POS].isdecimal() or " " in cells[POS]:
                raise ValueError(
                    f"{path}, line {number}: the third column must hold a part of speech, got {cells[POS]!r}: give an "
                    f"all-words file, or a table whose header has the columns {', '.join(TABLE_COLUMNS)}"
                )
            letter = _letter(cells[POS])
            parts = dict.fromkeys(cells[column].split(";"))  # each once
            senses = tuple(part for part in parts if part not in UNTAGGED)
            wanted = senses if labelled else letter and cells[LEMMA] not in UNTAGGED
            if wanted:
                lemma = f"{cells[LEMMA].lower()}.{letter}" if letter else cells[LEMMA].lower()
                where = f"{path}, line {number}"
                targets.append(
                    Target(len(sentences), word, lemma, senses if labelled else (), where)
                )
        sentences.append([cells[WORD].replace("_", " ") for _, cells in rows])
    return SenseData(sentences, targets, str(path))


def _letter(tag: str) -> str:
    """WordNet's letter for a part of speech; "" if WordNet has no words of it."""
    if tag in OTHER_PARTS:
        return ""
    if tag.startswith("ADV"):
        return "r"
    return {"N": "n", "V": "v", "J": "a", "A": "a", "R": "r"}.get(tag[:1], "")


class SenseExample(NamedTuple):
    """A sentence with its targets, or the window of a long sentence around one target.

    Fields:
        spans: [start, stop) of each target's tokens in ``input_ids``, in the order of ``targets``.
        targets: indices of the targets in the data.
    """

    input_ids: list[int]
    spans: list[tuple[int, int]]
    targets: list[int]


def encode_senses(
    data: SenseData, tokenizer: TokenizerLike, max_length: int, *, show_progress: bool | None = None
) -> list[SenseExample]:
    """Token ids of the sentences that have targets.

    A sentence is one example with all its targets. A sentence longer than ``max_length`` gives one example for each
    target, with the tokens around it.

    Raises: ValueError if ``max_length`` leaves no room for a token.
    """
    check_room(max_length)
    special, splitter = special_tokens(tokenizer), tokenizer_for_words(tokenizer)
    of_sentence: dict[int, list[int]] = {}
    for number, target in enumerate(data.targets):
        of_sentence.setdefault(target.sentence, []).append(number)
    wanted = sorted(of_sentence)
    examples: list[SenseExample] = []
    begins = range(0, len(wanted), SENTENCES_AT_ONCE)
    for begin in progress_bar(begins, "encoding", "batch", show_progress):
        batch = wanted[begin : begin + SENTENCES_AT_ONCE]
        encodings = splitter.encode_batch(
            [data.sentences[i] for i in batch], is_pretokenized=True, add_special_tokens=False
        )
        for sentence, encoding in zip(batch, encodings, strict=True):
            ids, starts = ids_and_starts(encoding, len(data.sentences[sentence]), special.unk)
            numbers = sorted(of_sentence[sentence], key=lambda n: data.targets[n].word)
            groups = [numbers] if len(ids) <= max_length - 2 else [[n] for n in numbers]
            for group in groups:
                words = [data.targets[n].word for n in group]
                first, stop = _around(starts[words[0]], starts[words[0] + 1], len(ids), max_length)
                offset = len(special.begin) - first
                spans = [
                    (starts[word] + offset, min(starts[word + 1], stop) + offset) for word in words
                ]
                inside = [*special.begin, *ids[first:stop], special.sep]
                examples.append(SenseExample(inside, spans, group))
    return examples


def _around(start: int, stop: int, length: int, max_length: int) -> tuple[int, int]:
    """The largest range of tokens that fits ``max_length``, with [start, stop) as close to its middle as possible."""
    room = max_length - 2
    if length <= room:
        return 0, length
    first = max(0, min((start + stop - room) // 2, start, length - room))
    return first, first + room


def collate_senses(examples: Sequence[SenseExample]) -> ModelArguments:
    """The model's arguments.

    Returns: {"batch": PackedBatch,
        "spans": int32 (2 * targets,), start and stop of each target's tokens as indices of the batch's packed rows}.
    """
    lengths = [len(example.input_ids) for example in examples]
    offsets = accumulate(lengths, initial=0)
    spans = [
        offset + edge
        for offset, example in zip(offsets, examples, strict=False)
        for edge in chain.from_iterable(example.spans)
    ]
    batch = pack_sequences([example.input_ids for example in examples])
    return {"batch": batch, "spans": torch.tensor(spans, dtype=torch.int32)}


def in_sense_parts(data: SenseData, size: int) -> Iterator[SenseData]:
    """The data in parts of ``size`` targets; the last part may be smaller."""
    for start in range(0, len(data.targets), size):
        yield SenseData(data.sentences, data.targets[start : start + size], data.path)
