"""Static word vectors: memory-mapped files of word2vec and GloVe, nearest words, analogies and similarity."""

import math
import mmap
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._base.extras import require
from fastenc.analysis.intervals import Interval, spearman_interval
from fastenc.analysis.similarity import ScoredPairs

VECTORS_AT_ONCE = 65_536  # number of vectors in a block of a search

Rows = Callable[[Sequence[int]], Tensor]  # indices → float32 (indices, width)


class Neighbour(NamedTuple):
    """A word and its cosine similarity with the query."""

    word: str
    cosine: float


class StaticVectors:
    """A vector for each word.

    Args:
        words: the words. If a word occurs several times, its first vector is used.
        rows: function of indices that returns vectors: float32 (indices, width). It may read them from a file.
        name: name of the vectors in messages.
    """

    def __init__(self, words: Sequence[str], rows: Rows, name: str = "vectors"):
        self.words, self.name = list(words), name
        self.index: dict[str, int] = {}
        repeated = [i for i, word in enumerate(self.words) if self.index.setdefault(word, i) != i]
        self._repeated = torch.tensor(repeated, dtype=torch.long)
        self._rows = rows

    @classmethod
    def of(cls, words: Sequence[str], vectors: Tensor) -> "StaticVectors":
        """The vectors (words, width) of a matrix in memory."""
        return cls(words, lambda indices: vectors[torch.as_tensor(indices)].float())

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self.index

    def __getitem__(self, words: Sequence[str]) -> Tensor:
        """The vectors of words: float32 (words, width). Raises: ValueError for an unknown word."""
        for word in words:
            if word not in self.index:
                raise ValueError(
                    f"{self.name}: the word {word!r} is not among its {len(self):,} words: check its spelling and case"
                )
        return self._rows([self.index[word] for word in words])

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """(first index, vectors) of all words, block by block."""
        for start in range(0, len(self), VECTORS_AT_ONCE):
            yield start, self._rows(range(start, min(start + VECTORS_AT_ONCE, len(self))))

    def nearest(
        self, vectors: Tensor, count: int = 10, leave_out: Sequence[Sequence[str]] = ()
    ) -> list[list[Neighbour]]:
        """The words with the highest cosine similarities, best first.

        Args:
            vectors: (queries, width).
            count: number of words for each query.
            leave_out: for each query, words that are excluded.
        Returns: a list for each query.
        """
        most = count + max(map(len, leave_out), default=0)
        unit = F.normalize(vectors.float(), dim=1)
        best, indices = torch.empty(len(unit), 0), torch.empty(len(unit), 0, dtype=torch.long)
        for start, block in self.blocks():
            cosines = unit @ F.normalize(block, dim=1).T
            repeated = self._repeated - start
            cosines[:, repeated[(repeated >= 0) & (repeated < len(block))]] = -torch.inf
            of_block = start + torch.arange(len(block)).expand(len(unit), -1)
            candidates = torch.cat((best, cosines), 1)
            best, chosen = candidates.topk(min(most, candidates.shape[1]), dim=1)
            indices = torch.cat((indices, of_block), 1).gather(1, chosen)
        neighbours = []
        for query, (values, rows) in enumerate(zip(best.tolist(), indices.tolist(), strict=True)):
            excluded = set(leave_out[query]) if leave_out else set()
            named = (
                Neighbour(self.words[row], value)
                for row, value in zip(rows, values, strict=True)
                if value > -torch.inf
            )
            neighbours.append([each for each in named if each.word not in excluded][:count])
        return neighbours

    def neighbours(self, word: str, count: int = 10) -> list[Neighbour]:
        """The nearest words of a word, without the word itself."""
        return self.nearest(self[[word]], count, [[word]])[0]

    def analogies(
        self, questions: Sequence[tuple[str, str, str]], count: int = 1
    ) -> list[list[Neighbour]]:
        """For each question (a, b, c), the best words d in "a is to b as c is to d".

            d = argmax cos(d, b/|b| - a/|a| + c/|c|),  a, b and c excluded

        Returns: ``count`` :class:`Neighbour` for each question, best first.
        Source: Mikolov et al. 2013, arXiv:1301.3781; Levy and Goldberg 2014 (3CosAdd).
        """
        if not questions:
            return []
        a, b, c = (
            F.normalize(self[[question[i] for question in questions]], dim=1) for i in range(3)
        )
        return self.nearest(b - a + c, count, questions)


def read_static_vectors(path: str | Path) -> StaticVectors:
    """Vectors of a file of word2vec (binary .bin, or text) or GloVe (text without a header line).

    The file is read once to find its words, and memory-mapped. A vector is read when it is needed.
    Raises: ValueError for a compressed or empty file, another number of vectors than the header says, and with the
        line for a vector of another width.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file: check the path")
    if path.suffix == ".gz":
        raise ValueError(
            f"{path} must not be compressed, because it is memory-mapped: gunzip it first"
        )
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty: give a file of word vectors")
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return (_read_binary if path.suffix == ".bin" else _read_text)(path, data)


def _read_binary(path: Path, data: mmap.mmap) -> StaticVectors:
    numpy = require("numpy", extra="train")
    count, width, position = _header(path, data)
    if count is None:
        raise ValueError(
            f"{path}: a binary file must begin with a line of two numbers, of vectors and of dimensions, got another "
            "line: give a word2vec file, or rename a text file"
        )
    words, offsets, size = [], [], 4 * width
    for _ in range(count):
        space = data.find(b" ", position)
        if space < 0 or space + 1 + size > len(data):
            break
        words.append(data[position:space].lstrip(b"\n").decode("utf-8", errors="replace"))
        offsets.append(space + 1)
        position = space + 1 + size
    _check_count(path, count, len(words), bool(data[position:].strip(b"\n")))
    positions, columns = numpy.asarray(offsets), numpy.arange(size)
    file = numpy.frombuffer(data, dtype=numpy.uint8)

    def rows(wanted: Sequence[int]) -> Tensor:
        rows = file[positions[list(wanted)][:, None] + columns].view("<f4")
        return torch.from_numpy(rows.astype(numpy.float32))

    return StaticVectors(words, rows, str(path))


def _read_text(path: Path, data: mmap.mmap) -> StaticVectors:
    numpy = require("numpy", extra="train")
    count, width, position = _header(path, data)
    number = 0 if count is None else 1
    words, starts = [], []
    data.seek(position)
    while line := data.readline():
        number += 1
        text = line.rstrip()
        if not text:
            position = data.tell()
            continue
        width = width or len(text.split(b" ")) - 1
        # Split from the right, because a word of GloVe may contain spaces.
        cells = text.rsplit(b" ", width)
        if not width or len(cells) != width + 1 or not _is_number(cells[1]):
            shown = text[:60].decode(errors="replace")
            numbers = f"{width} numbers" if width else "numbers, with spaces between them"
            raise ValueError(
                f"{path}, line {number}: a line must have a word and {numbers}, got {shown!r}: correct it"
            )
        words.append(cells[0].decode("utf-8", errors="replace"))
        starts.append(position + len(cells[0]) + 1)
        position = data.tell()
    if count is not None:
        _check_count(path, count, len(words), False)

    def rows(wanted: Sequence[int]) -> Tensor:
        rows = numpy.empty((len(wanted), width), dtype=numpy.float32)
        for i, line_number in enumerate(wanted):
            end = data.find(b"\n", starts[line_number])
            line = data[starts[line_number] : end if end >= 0 else len(data)]
            rows[i] = line.split()
        return torch.from_numpy(rows)

    return StaticVectors(words, rows, str(path))


def _header(path: Path, data: mmap.mmap) -> tuple[int | None, int, int]:
    """(number of vectors, width, index of the first vector's byte). The first two are None and 0 without a header.

    A byte-order mark is skipped.
    """
    start = len(BOM_UTF8) if data[: len(BOM_UTF8)] == BOM_UTF8 else 0
    end = data.find(b"\n")
    numbers = data[start : min(end, 100)].split() if end >= 0 else []
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        return None, 0, start
    count, width = map(int, numbers)
    if not count or not width:
        raise ValueError(
            f"{path}: the numbers in the first line must be positive, got {count} {width}: write the file again"
        )
    return count, width, end + 1


def _check_count(path: Path, expected: int, actual: int, more: bool) -> None:
    """Raises: ValueError if the file has another number of vectors than its header says."""
    if actual != expected or more:
        got = f"more than {actual:,}" if more else f"{actual:,}"
        raise ValueError(
            f"{path}: the first line says {expected:,} vectors, the file holds {got}: copy or write it again"
        )


def _is_number(text: bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class StaticCorrelation(NamedTuple):
    """Spearman's correlation with human scores, and the share of pairs whose words both have a vector.

    ``interval`` is the correlation's 95 % interval, by a bootstrap over these pairs.
    """

    spearman: float
    covered: float
    interval: Interval


def static_correlation(vectors: StaticVectors, data: ScoredPairs) -> StaticCorrelation:
    """Correlation of cosine similarities with human scores of word pairs; NaN if fewer than two pairs have vectors."""
    stats = require("scipy.stats", extra="train")
    known = [i for i, pair in enumerate(data.pairs) if all(word in vectors for word in pair)]
    covered = len(known) / len(data.pairs)
    if len(known) < 2:
        return StaticCorrelation(math.nan, covered, (math.nan, math.nan))
    one, other = (vectors[[data.pairs[i][side] for i in known]] for side in (0, 1))
    cosines = F.cosine_similarity(one, other, dim=1).numpy()
    scores = [data.scores[i] for i in known]
    spearman = float(stats.spearmanr(cosines, scores).statistic)
    return StaticCorrelation(spearman, covered, spearman_interval(cosines.tolist(), scores))


def train_word2vec(sentences: Iterable[Sequence[str]], **options: Any) -> StaticVectors:
    """Train skip-gram or CBOW vectors with gensim (extra: static).

    Args:
        sentences: sentences as words; iterated over several times.
        options: of ``gensim.models.Word2Vec``, such as vector_size, window, min_count, sg, epochs, workers, seed.
    Raises: ValueError if no word occurs ``min_count`` times (5 by default).
    """
    models = require("gensim.models", extra="static")
    try:
        trained = models.Word2Vec(sentences=sentences, **options).wv
    except RuntimeError as error:  # gensim has no other error for a vocabulary of no words
        raise ValueError(
            f"a word must occur min_count={options.get('min_count', 5)} times, got none ({error}): give more "
            "sentences, or a smaller min_count"
        ) from error
    return StaticVectors.of(list(trained.index_to_key), torch.from_numpy(trained.vectors))
