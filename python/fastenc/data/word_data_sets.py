"""Words and tags of a Hugging Face data set, in the rows of a file with a word a line."""

from collections.abc import Iterator
from pathlib import Path

from fastenc.data.rows import Row, file_type_of, is_data_set, numbered_rows

WORD_COLUMNS = ("tokens", "words")


def names_data_set(path: str | Path) -> bool:
    """Whether this is the folder of a data set, or may be the name of one on the hub."""
    path = Path(path)
    return is_data_set(path) or not (path.exists() or path.is_absolute() or file_type_of(path))


def rows_of_words(path: str | Path) -> Iterator[list[tuple[int, list[str]]]]:
    """The sentences of a data set: for each word the number of the data set's row, the word, and its tags.

    The words are in the column ``tokens`` or ``words``, a list of texts. The tags are in the other columns that have a
    text or a class for each word. Those with "tag" or "label" in their names come last: the last column of conll2003
    (``pos_tags``, ``chunk_tags``, ``ner_tags``) is that of the entities.

    Raises: ValueError for a data set that cannot be loaded, without such a column of words, or without rows, and for a
        row whose tags are not one for each word although the first row's are.
    """
    columns: list[str] = []
    for number, (where, row) in enumerate(numbered_rows(path, [])):
        columns = columns or _columns(row, where)
        words = row[columns[0]]
        fitting = [name for name in columns if _has_a_text_for_each(words, row[name])]
        if not fitting:
            raise ValueError(
                f"{where}: the words must be a list of texts, got {words!r}: correct the row"
            )
        for name in columns:
            if number and name not in fitting and _names_tags(name):
                raise ValueError(
                    f"{where}: column {name!r} must have a tag for each of the {len(words)} words, got {row[name]!r}: "
                    "correct the row"
                )
        columns = fitting
    for number, (_, row) in enumerate(numbered_rows(path, [])):
        cells = zip(*(row[name] for name in columns), strict=True)
        of_words = [(number, [cell or "" for cell in of_word]) for of_word in cells]
        if of_words:
            yield of_words


def _columns(row: Row, where: str) -> list[str]:
    """The column of the words, then the others, those of tags last."""
    words = next((name for name in WORD_COLUMNS if name in row), None)
    if words is None:
        raise ValueError(
            f"{where}: the words must be in a column 'tokens' or 'words', got {list(row)}: rename the column"
        )
    others = [name for name in row if name != words]
    return [words, *sorted(others, key=_names_tags)]


def _names_tags(column: str) -> bool:
    return "tag" in column or "label" in column


def _has_a_text_for_each(words: object, value: object) -> bool:
    """Whether a value is a list with a text, or with None for a missing class, for each word."""
    if not isinstance(words, list) or not isinstance(value, list) or len(value) != len(words):
        return False
    return all(each is None or isinstance(each, str) for each in value)
