"""Reads sentences with their entities, which may be nested, from columns of tags or from JSON lines."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastenc.data.columns import (
    Sentence,
    iterate_words,
    place_of,
    read_tagged,
    sentence,
    sentence_rows,
)
from fastenc.data.rows import file_type_of, numbered_rows
from fastenc.text.tags import Span, scheme_of, spans


@dataclass(frozen=True)
class EntityData:
    """Sentences and their entities.

    Fields:
        sentences: without tags.
        entities: a list for each sentence; empty if they are to be predicted.
        label_names: the entity types, in the order of their class indices.
        path: the file that the sentences come from.
    """

    sentences: list[Sentence]
    entities: list[list[Span]]
    label_names: list[str]
    path: str = "data"

    def __len__(self) -> int:
        return len(self.sentences)


def read_entities(
    path: str | Path,
    word_column: int | None = None,
    tag_column: int | None = None,
    inner_tag_column: int | Sequence[int] | None = None,
    label_names: Sequence[str] | None = None,
) -> EntityData:
    """Sentences with entities.

    A ``.jsonl`` file has an object a line, ``{"tokens": [...], "entities": [[start, end, type], ...]}``. ``start``
    is the index of an entity's first word, ``end`` the index after its last. Entities may be nested. Any other file,
    and a data set, has columns as :func:`read_tagged` reads them, with IOB2 or BIOES tags in one column, or in several
    columns for nested entities, as in GermEval 2014.

    Args:
        word_column, tag_column: from 1, as in :func:`read_tagged`.
        inner_tag_column: from 1, one or several columns of nested entities. If it is given without ``tag_column``,
            ``tag_column`` is the column before the first of them.
        label_names: the entity types in the training set's order; None: those found, sorted.
    Raises: ValueError as :func:`read_tagged`, and with file and line for bad JSON, a field that is missing or has a
        wrong type, a sentence without words, an entity outside its sentence, a tag that is neither IOB2 nor BIOES, a
        type that is not in ``label_names``, and a file without entities if ``label_names`` is None.
    """
    if file_type_of(path) == ".jsonl":
        sentences, entities = _json_sentences(path)
    else:
        columns = [tag_column]
        if inner_tag_column is not None:
            inner = [inner_tag_column] if isinstance(inner_tag_column, int) else [*inner_tag_column]
            columns = [inner[0] - 1 if tag_column is None else tag_column, *inner]
        sentences, entities = _tagged_sentences(path, word_column, columns)
    names = label_names
    if names is None:
        names = sorted({entity.type for row in entities for entity in row})
        if not names:
            raise ValueError(
                f"{path} must hold at least one entity to learn from, got none: give another file, or give "
                "tag_column the column of the entities"
            )
        if file_type_of(path) != ".jsonl":
            _warn_of_unread_levels(path, columns, set(names))
    for each, row in zip(sentences, entities, strict=True):
        for entity in row:
            if entity.type not in names:
                raise ValueError(
                    f"{place_of(path, each.lines[entity.first])}: the type {entity.type!r} of {shown(each, entity)} is "
                    f"not one of the training set's {list(names)}: correct it, or add sentences with it to the "
                    "training set"
                )
    return EntityData(sentences, entities, list(names), str(path))


def read_unlabelled(path: str | Path, word_column: int | None = None) -> EntityData:
    """Sentences to find entities in: ``.jsonl`` with ``tokens``, or as :func:`read_words` reads them.

    Raises: ValueError as :func:`read_entities`; a sentence may have no words here.
    """
    return EntityData(list(iterate_unlabelled(path, word_column)), [], [], str(path))


def iterate_unlabelled(path: str | Path, word_column: int | None = None) -> Iterator[Sentence]:
    """The sentences of :func:`read_unlabelled`, one at a time."""
    if file_type_of(path) != ".jsonl":
        return iterate_words(path, word_column)
    return (_sentence(row, where) for where, row in numbered_rows(path, ["tokens"]))


def shown(each: Sentence, entity: Span) -> str:
    """The words of an entity, quoted for a message."""
    return repr(" ".join(each.words[entity.first : entity.stop])[:60])


def is_nested(entities: Iterable[Span]) -> bool:
    """Whether two entities of a sentence share a word."""
    ordered = sorted({(entity.first, entity.stop) for entity in entities})
    return any(one[1] > two[0] for one, two in zip(ordered, ordered[1:], strict=False))


def _tagged_sentences(
    path: str | Path, word_column: int | None, columns: Sequence[int | None]
) -> tuple[list[Sentence], list[list[Span]]]:
    # With a tag_scheme, read_tagged raises for a tag that is not an entity tag.
    levels = [read_tagged(path, word_column, column, tag_scheme="iob2") for column in columns]
    sentences = [each._replace(tags=[]) for each in levels[0].sentences]
    rows = zip(*(level.sentences for level in levels), strict=True)
    # An entity that occurs in several columns is kept once.
    entities = [list(dict.fromkeys(s for each in row for s in spans(each.tags))) for row in rows]
    return sentences, entities


def _warn_of_unread_levels(
    path: str | Path, columns: Sequence[int | None], types: set[str]
) -> None:
    """Warn if columns that are not read hold entities of the same types, as columns of nested entities do."""
    tags: dict[int, set[str]] = {}
    for rows in sentence_rows(path):
        for _, cells in rows:
            for number, cell in enumerate(cells, start=1):
                tags.setdefault(number, set()).add(cell)
    read = {max(tags) if column is None else column for column in columns}
    unread = [
        number
        for number, column_tags in tags.items()
        if number not in read
        and scheme_of(column_tags)
        and types & {tag.partition("-")[2] for tag in column_tags}
    ]
    if unread:
        first, *inner = sorted(read.union(unread))
        warnings.warn(
            f"{path}: column {', '.join(map(str, unread))} holds entities of the same types, which are not read: give "
            f"tag_column={first} and inner_tag_column={tuple(inner)} to read every level",
            stacklevel=4,
        )


def _json_sentences(path: str | Path) -> tuple[list[Sentence], list[list[Span]]]:
    sentences, entities = [], []
    for where, row in numbered_rows(path, ["tokens", "entities"]):
        each = _sentence(row, where)
        if not each.words:
            raise ValueError(
                f"{where}: a sentence must have words, got tokens []: leave out the line"
            )
        if not isinstance(row["entities"], list):
            raise ValueError(
                f"{where}: entities must be a list of [start, end, type], got {row['entities']!r}: correct it"
            )
        spans = [_entity(value, each, where) for value in row["entities"]]
        sentences.append(each)
        entities.append(list(dict.fromkeys(spans)))
    return sentences, entities


def _sentence(row: Mapping[str, object], where: str) -> Sentence:
    words = row["tokens"]
    if not isinstance(words, list) or not all(isinstance(w, str) and w for w in words):
        raise ValueError(
            f"{where}: tokens must be a list of words, none of them empty, got {words!r}: correct it"
        )
    line = int(where.rsplit(" ", 1)[1])
    return sentence(words, (), [line] * len(words))


def _entity(value: object, each: Sentence, where: str) -> Span:
    types = [type(part) for part in value] if isinstance(value, list) else []
    if not isinstance(value, list) or types != [int, int, str] or not value[2]:
        raise ValueError(
            f"{where}: an entity must be [start, end, type], got {value!r}: correct it"
        )
    first, stop, entity_type = value
    if not 0 <= first < stop <= len(each.words):
        raise ValueError(
            f"{where}: an entity must lie within the sentence's {len(each.words)} words, got {value}: start counts "
            "from 0, and end is the index after the last word"
        )
    return Span(entity_type, first, stop)
