"""Languages of unequal size: smoothed sampling shares, and the files of each language."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from random import Random

from fastenc.data.readers import TABLES, is_data_set, kind_of, read_texts

ALPHA = 0.3


def smoothed_shares(sizes: Mapping[str, float], alpha: float = ALPHA) -> dict[str, float]:
    """The share of each language after exponential smoothing, which raises the shares of small languages:

        q_i = p_i^alpha / sum_j p_j^alpha,   p_i = size_i / sum_j size_j

    Args:
        sizes: size of each language, positive, in any unit.
        alpha: in [0, 1]; 1 keeps the sizes' proportions, 0 makes all languages equal.
    Raises: ValueError for an alpha outside [0, 1], no language, or a size that is not positive.
    Source: Lample & Conneau 2019, arXiv:1901.07291 (0.5); Conneau et al. 2020, arXiv:1911.02116 (0.3).
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}: 0.3 is usual, 1 keeps the sizes")
    if not sizes:
        raise ValueError("shares need at least one language, got none")
    for language, size in sizes.items():
        if not size > 0:
            raise ValueError(f"language {language!r} must have text, got a size of {size}")
    total = sum(sizes.values())
    powers = {language: (size / total) ** alpha for language, size in sizes.items()}
    scale = sum(powers.values())
    return {language: power / scale for language, power in powers.items()}


class SampledLines:
    """Lines of texts in their order, each repeated as often as it was drawn. Every iteration yields the same lines.

    Fields:
        lines, characters: number of lines and characters of the texts.
        drawn: number of characters of the drawn lines.
    """

    def __init__(self, texts: Iterable[str]):
        self.texts = texts
        self.lengths = array("q", map(len, _lines(texts)))
        self.lines, self.characters = len(self.lengths), sum(self.lengths)
        self.rounds, self.drawn, self.again = 1, self.characters, bytearray(self.lines)

    def draw(self, characters: float, seed: str) -> None:
        """Draw all lines as often as they fit into ``characters``, then random lines up to that number."""
        self.rounds = int(characters // self.characters)
        self.drawn = self.rounds * self.characters
        self.again = bytearray(self.lines)
        order = array("q", range(self.lines))
        Random(f"{seed} {self.rounds}").shuffle(order)
        for line in order:
            if self.drawn >= characters:
                break
            self.again[line] = 1
            self.drawn += self.lengths[line]

    def __iter__(self) -> Iterator[str]:
        for line, again in zip(_lines(self.texts), self.again, strict=True):
            yield from repeat(line, self.rounds + again)


class Chained:
    """Several iterables of texts, one after another. It can be iterated any number of times."""

    def __init__(self, parts: Iterable[Iterable[str]]):
        self.parts = list(parts)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self.parts)


def sample_lines(
    documents: Mapping[str, Iterable[str]], *, alpha: float = ALPHA, seed: int = 0
) -> dict[str, SampledLines]:
    """Sample lines so that each language has its smoothed share of the characters; their total number stays the same.

    Every line of a language is drawn once before any is drawn again. The result depends on the texts, alpha and the
    seed only. Memory: 17 bytes a line. The texts are read here and again at each iteration over the lines; they are
    not kept.
    Raises: ValueError as :func:`smoothed_shares`.
    """
    drawn = {language: SampledLines(texts) for language, texts in documents.items()}
    sizes = {language: lines.characters for language, lines in drawn.items()}
    shares, total = smoothed_shares(sizes, alpha), sum(sizes.values())
    for language, lines in drawn.items():
        lines.draw(shares[language] * total, f"{seed} {language}")
    return drawn


def _lines(texts: Iterable[str]) -> Iterator[str]:
    return (line for text in texts for line in text.split("\n") if line.strip())


def language_files(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Files of each language from arguments ``name=path``. A path may be a folder of text files and tables.

    A language may be given several times.
    Raises: ValueError for another form, or a folder without such files.
    """
    found: dict[str, list[str]] = {}
    for argument in arguments:
        language, equals, path = argument.partition("=")
        if not (language and equals and path):
            raise ValueError(f"--language must be name=file or name=folder, got {argument!r}")
        found.setdefault(language, []).extend(text_files(path))
    return found


def text_files(path: str) -> list[str]:
    """The path itself, or the text files and tables in a folder, sorted by name."""
    folder = Path(path)
    if not folder.is_dir() or is_data_set(folder):
        return [path]
    inside = sorted(file for file in folder.rglob("*") if kind_of(file) in (".txt", *TABLES))
    if not inside:
        raise ValueError(
            f"{path} holds no {', '.join(('.txt', *TABLES))} file (.gz): give a folder that does"
        )
    return [str(file) for file in inside]


def read_languages(
    files: Mapping[str, Sequence[str]], column: str | None = None
) -> dict[str, list[str]]:
    """The documents of each language. Raises: ValueError as ``read_texts``."""
    return {
        language: [text for path in paths for text in read_texts(path, column)]
        for language, paths in files.items()
    }
