"""Languages of unequal size: smoothed sampling shares, sampled lines, and the files of each language."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from random import Random

from fastenc.data.readers import read_texts
from fastenc.data.rows import TABLES, file_type_of, is_data_set

ALPHA = 0.3  # exponent of the smoothing, the value of XLM-R


def check_alpha(alpha: float) -> None:
    """Raises: ValueError for an exponent outside [0, 1]."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}: 0.3 is usual, 1 keeps the sizes")


def smoothed_shares(sizes: Mapping[str, float], alpha: float = ALPHA) -> dict[str, float]:
    """The share of each language after exponential smoothing, which raises the shares of small languages:

        q_i = p_i^alpha / sum_j p_j^alpha,   p_i = size_i / sum_j size_j

    Args:
        sizes: size of each language, positive, in any unit.
        alpha: in [0, 1]; 1 keeps the sizes' proportions, 0 makes all languages equal.
    Returns: {language: share}; the shares add up to 1.
    Raises: ValueError for an alpha outside [0, 1], no language, or a size that is not positive.
    Source: Lample & Conneau 2019, arXiv:1901.07291 (alpha 0.5); Conneau et al. 2020, arXiv:1911.02116 (alpha 0.3).
    """
    check_alpha(alpha)
    if not sizes:
        raise ValueError("there must be at least one language, got none: give texts")
    for language, size in sizes.items():
        if not size > 0:
            raise ValueError(
                f"the size of language {language!r} must be positive, got {size}: give it text, or leave it out"
            )
    total = sum(sizes.values())
    powers = {language: (size / total) ** alpha for language, size in sizes.items()}
    scale = sum(powers.values())
    return {language: power / scale for language, power in powers.items()}


class SampledLines:
    """The lines of texts in their order, each as often as it was sampled. Every iteration yields the same lines.

    Fields:
        lines, characters: number of lines and characters of the texts.
        sampled_characters: number of characters of the sampled lines.
    """

    def __init__(self, texts: Iterable[str]):
        self.texts = texts
        self.lengths = array("q", map(len, _lines(texts)))
        self.lines, self.characters = len(self.lengths), sum(self.lengths)
        self.repeats, self.sampled_characters = 1, self.characters
        self.once_more = bytearray(self.lines)

    def sample(self, characters: float, seed: str) -> None:
        """Repeat all lines as often as they fit into ``characters``, and add random lines up to that number."""
        self.repeats = int(characters // self.characters)
        self.sampled_characters = self.repeats * self.characters
        self.once_more = bytearray(self.lines)
        order = array("q", range(self.lines))
        Random(f"{seed} {self.repeats}").shuffle(order)
        for line in order:
            if self.sampled_characters >= characters:
                break
            self.once_more[line] = 1
            self.sampled_characters += self.lengths[line]

    def __iter__(self) -> Iterator[str]:
        for line, once_more in zip(_lines(self.texts), self.once_more, strict=True):
            yield from repeat(line, self.repeats + once_more)


class Chained:
    """Several iterables of texts, one after another. It can be iterated any number of times."""

    def __init__(self, iterables: Iterable[Iterable[str]]):
        self.iterables = list(iterables)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self.iterables)


def sample_lines(
    documents: Mapping[str, Iterable[str]], *, alpha: float = ALPHA, seed: int = 0
) -> dict[str, SampledLines]:
    """Sample lines so that each language has its smoothed share of the characters.

    The total number of characters stays the same, up to one line a language. Every line of a language is sampled once
    before any is sampled again. The result depends on the texts, alpha and the seed only. The texts are read here and
    again at each iteration over the lines. They are not kept in memory; 17 bytes a line are.

    Args:
        documents: {language: texts}; the texts must be iterable several times.
        alpha: exponent of the smoothing, as in :func:`smoothed_shares`.
    Raises: ValueError as :func:`smoothed_shares`.
    """
    check_alpha(alpha)  # before the texts are read
    sampled = {language: SampledLines(texts) for language, texts in documents.items()}
    sizes = {language: lines.characters for language, lines in sampled.items()}
    shares, total = smoothed_shares(sizes, alpha), sum(sizes.values())
    for language, lines in sampled.items():
        lines.sample(shares[language] * total, f"{seed} {language}")
    return sampled


def _lines(texts: Iterable[str]) -> Iterator[str]:
    return (line for text in texts for line in text.split("\n") if line.strip())


def language_files(arguments: Sequence[str]) -> dict[str, list[str]]:
    """{language: files} from arguments ``name=path``. A path may be a folder of text files and tables.

    A language may be given several times.
    Raises: ValueError if an argument is not ``name=path``, or if a folder has no such files.
    """
    of_language: dict[str, list[str]] = {}
    for argument in arguments:
        language, equals, path = argument.partition("=")
        if not (language and equals and path):
            raise ValueError(
                f"language must be name=file or name=folder, got {argument!r}: write it like de=german.txt"
            )
        of_language.setdefault(language, []).extend(text_files(path))
    return of_language


def text_files(path: str) -> list[str]:
    """The path itself, or the text files and tables in a folder, sorted by name."""
    folder = Path(path)
    if not folder.is_dir() or is_data_set(folder):
        return [path]
    inside = sorted(file for file in folder.rglob("*") if file_type_of(file) in (".txt", *TABLES))
    if not inside:
        raise ValueError(
            f"{path} must hold a file of the kinds {', '.join(('.txt', *TABLES))} (or gzipped), got none: give another "
            "folder"
        )
    return [str(file) for file in inside]


def read_languages(
    files: Mapping[str, Sequence[str]], column: str | None = None, quoting: str | None = None
) -> dict[str, list[str]]:
    """The documents of each language. column, quoting, Raises: as ``read_texts``."""
    return {
        language: [text for path in paths for text in read_texts(path, column, quoting)]
        for language, paths in files.items()
    }
