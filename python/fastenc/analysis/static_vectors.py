"""Static word vectors: files of word2vec and GloVe, mapped and not loaded; neighbours and similarity."""

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._extras import require
from fastenc.analysis.similarity import ScoredPairs

ROWS = 65_536  # vectors read at once

Rows = Callable[[Sequence[int]], Tensor]


class Neighbour(NamedTuple):
    """A word and its cosine with what was asked for."""

    word: str
    cosine: float


class StaticVectors:
    """One vector a word.

    Args:
        words: the words, most frequent first where the file says so; of a word that recurs the first vector counts.
        rows: indices → float32 (indices, width); vectors stay where they are until they are asked for.
        name: for messages.
    """

    def __init__(self, words: Sequence[str], rows: Rows, name: str = "vectors"):
        self.words, self.name = list(words), name
        self.index: dict[str, int] = {}
        for i, word in enumerate(self.words):
            self.index.setdefault(word, i)
        self._rows = rows

    @classmethod
    def of(cls, words: Sequence[str], vectors: Tensor) -> "StaticVectors":
        """Of a matrix in memory."""
        return cls(words, lambda positions: vectors[torch.as_tensor(positions)].float())

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self.index

    def __getitem__(self, words: Sequence[str]) -> Tensor:
        """float32 (words, width). Raises: ValueError for a word that is not there."""
        for word in words:
            if word not in self.index:
                raise ValueError(
                    f"{self.name}: the word {word!r} is not among its {len(self):,} words: check its spelling and case"
                )
        return self._rows([self.index[word] for word in words])

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """(first index, vectors) of all words, block by block."""
        for start in range(0, len(self), ROWS):
            yield start, self._rows(range(start, min(start + ROWS, len(self))))

    def nearest(
        self, vectors: Tensor, count: int = 10, leave_out: Sequence[Sequence[str]] = ()
    ) -> list[list[Neighbour]]:
        """The words with the highest cosines.

        Args:
            vectors: (queries, width).
            leave_out: for each query, words that are no answer.
        """
        most = count + max(map(len, leave_out), default=0)
        unit = F.normalize(vectors.float(), dim=1)
        best, positions = torch.empty(len(unit), 0), torch.empty(len(unit), 0, dtype=torch.long)
        for start, block in self.blocks():
            cosines = unit @ F.normalize(block, dim=1).T
            own = start + torch.arange(len(block)).expand(len(unit), -1)
            together = torch.cat((best, cosines), 1)
            best, chosen = together.topk(min(most, together.shape[1]), dim=1)
            positions = torch.cat((positions, own), 1).gather(1, chosen)
        found = []
        for query, (values, rows) in enumerate(zip(best.tolist(), positions.tolist(), strict=True)):
            excluded = set(leave_out[query]) if leave_out else set()
            named = (Neighbour(self.words[row], v) for row, v in zip(rows, values, strict=True))
            found.append([each for each in named if each.word not in excluded][:count])
        return found

    def neighbours(self, word: str, count: int = 10) -> list[Neighbour]:
        """The words nearest to a word, itself left out."""
        return self.nearest(self[[word]], count, [[word]])[0]

    def analogies(self, questions: Sequence[tuple[str, str, str]], count: int = 1) -> list[Any]:
        """For each (a, b, c) the words d in "a is to b as c is to d".

            d = argmax cos(d, b/|b| - a/|a| + c/|c|),  a, b and c left out

        Source: Mikolov et al. 2013, arXiv:1301.3781; Levy and Goldberg 2014 (3CosAdd).
        """
        a, b, c = (
            F.normalize(self[[question[i] for question in questions]], dim=1) for i in range(3)
        )
        return self.nearest(b - a + c, count, questions)


def read_static_vectors(path: str | Path) -> StaticVectors:
    """Vectors of a file of word2vec (binary: .bin; text) or GloVe (text without a first line of counts).

    The file is gone through once to find its words, and mapped; vectors are read when they are asked for.
    Raises: ValueError for a file that is compressed, holds another number of vectors than it says, or vectors of
        another width, naming the line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file: check the path")
    if path.suffix == ".gz":
        raise ValueError(f"{path} is compressed and cannot be mapped: gunzip it first")
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
            f"{path}: a binary file must begin with a line of its numbers of vectors and of dimensions"
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
        found = file[positions[list(wanted)][:, None] + columns].view("<f4")
        return torch.from_numpy(found.astype(numpy.float32))

    return StaticVectors(words, rows, str(path))


def _read_text(path: Path, data: mmap.mmap) -> StaticVectors:
    numpy = require("numpy", extra="train")
    count, width, position = _header(path, data)
    number = 1 if position else 0
    words, starts = [], []
    data.seek(position)
    while line := data.readline():
        number += 1
        text = line.rstrip()
        if not text:
            continue
        if width == 0:
            width = len(text.split(b" ")) - 1
        # From the right, since a word of GloVe's may hold spaces.
        parts = text.rsplit(b" ", width)
        if len(parts) != width + 1 or not _is_number(parts[1]):
            shown = text[:60].decode(errors="replace")
            raise ValueError(
                f"{path}, line {number}: a word and {width} numbers must be there, got {shown!r}"
            )
        words.append(parts[0].decode("utf-8", errors="replace"))
        starts.append(position + len(parts[0]) + 1)
        position = data.tell()
    if count is not None:
        _check_count(path, count, len(words), False)

    def rows(wanted: Sequence[int]) -> Tensor:
        found = numpy.empty((len(wanted), width), dtype=numpy.float32)
        for i, line_number in enumerate(wanted):
            end = data.find(b"\n", starts[line_number])
            line = data[starts[line_number] : end if end >= 0 else len(data)]
            found[i] = line.split()
        return torch.from_numpy(found)

    return StaticVectors(words, rows, str(path))


def _header(path: Path, data: mmap.mmap) -> tuple[int | None, int, int]:
    """(vectors, dimensions, where they begin); None and 0 in a file without a line of counts."""
    end = data.find(b"\n")
    parts = data[: min(end, 100)].split() if end >= 0 else []
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return None, 0, 0
    count, width = map(int, parts)
    if not count or not width:
        raise ValueError(f"{path}: the first line must hold positive counts, got {count} {width}")
    return count, width, end + 1


def _check_count(path: Path, said: int, found: int, more: bool) -> None:
    if found != said or more:
        got = f"more than {found:,}" if more else f"{found:,}"
        raise ValueError(
            f"{path}: the first line says {said:,} vectors, the file holds {got}: copy or write it again"
        )


def _is_number(text: bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class StaticCorrelation(NamedTuple):
    """Spearman's correlation with people's scores, and the share of pairs whose words are both there."""

    spearman: float
    covered: float


def static_correlation(vectors: StaticVectors, data: ScoredPairs) -> StaticCorrelation:
    """How well cosines rank pairs of words; NaN where fewer than two pairs are there."""
    stats = require("scipy.stats", extra="train")
    known = [i for i, pair in enumerate(data.pairs) if all(word in vectors for word in pair)]
    covered = len(known) / len(data.pairs)
    if len(known) < 2:
        return StaticCorrelation(float("nan"), covered)
    one, other = (vectors[[data.pairs[i][side] for i in known]] for side in (0, 1))
    cosines = F.cosine_similarity(one, other, dim=1).numpy()
    scores = [data.scores[i] for i in known]
    return StaticCorrelation(float(stats.spearmanr(cosines, scores).statistic), covered)


def train_word2vec(sentences: Iterable[Sequence[str]], **options: Any) -> StaticVectors:
    """Skip-gram or CBOW vectors by gensim (extra: static).

    Args:
        sentences: words; gone through several times.
        options: of ``gensim.models.Word2Vec``, such as vector_size, window, min_count, sg, epochs, workers, seed.
    """
    models = require("gensim.models", extra="static")
    keyed = models.Word2Vec(sentences=sentences, **options).wv
    return StaticVectors.of(list(keyed.index_to_key), torch.from_numpy(keyed.vectors))
