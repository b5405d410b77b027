"""Words in sentences, labelled with their senses: tables of one word a row, and all-words files in columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastenc._progress import progress_bar
from fastenc.data.columns import numbered_blocks
from fastenc.data.readers import TABLES, kind_of, numbered_lines, numbered_rows, text_of
from fastenc.data.words import check_room
from fastenc.models.tokenizers import ids_and_starts, special_tokens, tokenizer_for_words
from fastenc.packing import pack_sequences

CHUNK = 1000  # sentences encoded at once
TABLE_COLUMNS = ("word", "index", "sentence")
WORD, LEMMA, POS = 0, 1, 2  # columns of an all-words file
UNTAGGED = ("-", "_", "")


class Target(NamedTuple):
    """A word whose sense is wanted.

    Fields:
        sentence, word: index of the sentence in the data, and of the word in it.
        lemma: what its senses are looked up by, such as "bank" or "bank.n".
        senses: those that are right, none where they are to be predicted.
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
    """Targets from a table or a file in columns.

    A table (.tsv, .csv, .jsonl) has a target a row: ``word``, ``index`` (of the word among the sentence's words,
    from 0), ``sentence`` (words with spaces between) and the sense. Its header tells it from a file in columns, which
    has a word a line: word (several joined by _), lemma, part of speech (Penn or universal), and senses, with ";"
    between several and "-" for none; an empty line ends a sentence, "# " begins a comment. There a lemma is looked up
    with its part of speech: bank.n.

    Args:
        sense: a table's column of the sense.
        sense_column: of a file in columns, from 1. None: the last.
        labelled: take the words that have a sense; otherwise every row, and every noun, verb, adjective and adverb.
    Raises: ValueError with file and line for a column that is missing, a word that is not in its sentence, and a file
        without targets.
    """
    reader = _read_table if _is_table(path) else _read_columns
    option: Any = sense if reader is _read_table else sense_column
    data = reader(path, option, labelled)
    if not data.targets:
        raise ValueError(f"{path} has no word with a sense: give a file with labelled words")
    return data


def _is_table(path: str | Path) -> bool:
    if kind_of(path) == ".tsv":  # which both may be
        _, header = next(numbered_lines(Path(path)), (0, ""))
        return set(TABLE_COLUMNS) <= set(header.split("\t"))
    return kind_of(path) in TABLES


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
                f"{where}: column {sense!r} must hold a sense: leave out what has none"
            )
        targets.append(Target(len(sentences), int(index), str(row["word"]), senses, where))
        sentences.append(words)
    return SenseData(sentences, targets, str(path))


def _read_columns(path: str | Path, sense_column: int | None, labelled: bool) -> SenseData:
    sentences: list[list[str]] = []
    targets: list[Target] = []
    for rows in numbered_blocks(path):
        number, cells = rows[0]
        column = (sense_column or len(cells)) - 1
        if len(cells) < 3 or not 0 <= column < len(cells) or (labelled and column <= POS):
            raise ValueError(
                f"{path}, line {number}: a line must hold word, lemma, part of speech and sense, got {len(cells)} "
                f"columns and sense column {column + 1}: is it an all-words file?"
            )
        for word, (number, cells) in enumerate(rows):
            letter = _letter(cells[POS])
            senses = tuple(part for part in cells[column].split(";") if part not in UNTAGGED)
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
    """WordNet's letter of a part of speech, "" of one that it does not have."""
    if tag.startswith("ADV"):
        return "r"
    return {"N": "n", "V": "v", "J": "a", "A": "a", "R": "r"}.get(tag[:1], "")


class SenseExample(NamedTuple):
    """A sentence, or the window of a long one around a target.

    Fields:
        spans: [start, stop) of each target's tokens, in their order.
        targets: indices of the targets in the data.
    """

    input_ids: list[int]
    spans: list[tuple[int, int]]
    targets: list[int]


def encode_senses(
    data: SenseData, tokenizer: Any, max_length: int, *, show_progress: bool | None = None
) -> list[SenseExample]:
    """Token ids of the sentences that have targets, each read once; of one longer than ``max_length``, for each target
    the tokens around it.

    Raises: ValueError when ``max_length`` leaves no room for a token.
    """
    check_room(max_length)
    special, splitter = special_tokens(tokenizer), tokenizer_for_words(tokenizer)
    of_sentence: dict[int, list[int]] = {}
    for number, target in enumerate(data.targets):
        of_sentence.setdefault(target.sentence, []).append(number)
    wanted = sorted(of_sentence)
    examples: list[SenseExample] = []
    for begin in progress_bar(range(0, len(wanted), CHUNK), "encoding", "chunk", show_progress):
        chunk = wanted[begin : begin + CHUNK]
        encodings = splitter.encode_batch(
            [data.sentences[i] for i in chunk], is_pretokenized=True, add_special_tokens=False
        )
        for sentence, encoding in zip(chunk, encodings, strict=True):
            ids, starts = ids_and_starts(encoding, len(data.sentences[sentence]), special.unk)
            numbers = sorted(of_sentence[sentence], key=lambda n: data.targets[n].word)
            groups = [numbers] if len(ids) <= max_length - 2 else [[n] for n in numbers]
            for group in groups:
                words = [data.targets[n].word for n in group]
                first, stop = _around(starts[words[0]], starts[words[0] + 1], len(ids), max_length)
                spans = [
                    (starts[word] - first + 1, min(starts[word + 1], stop) - first + 1)
                    for word in words
                ]
                inside = [special.cls, *ids[first:stop], special.sep]
                examples.append(SenseExample(inside, spans, group))
    return examples


def _around(start: int, stop: int, length: int, max_length: int) -> tuple[int, int]:
    """The largest range of tokens that fits, with [start, stop) in its middle."""
    room = max_length - 2
    if length <= room:
        return 0, length
    first = max(0, min((start + stop - room) // 2, start, length - room))
    return first, first + room


def collate_senses(examples: Sequence[SenseExample]) -> dict[str, Any]:
    """{"batch": PackedBatch, "spans": int32 (2 * targets,), where each target begins and ends in the batch}."""
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
    """The data in parts of ``size`` targets."""
    for start in range(0, len(data.targets), size):
        yield SenseData(data.sentences, data.targets[start : start + size], data.path)
