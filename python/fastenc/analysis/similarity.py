"""Similarity and isotropy of each layer's vectors, before and after each dimension is standardised."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._base.extras import require
from fastenc.analysis.errors import TooFewData
from fastenc.analysis.intervals import Interval, mean_interval, spearman_interval
from fastenc.analysis.isotropy import Isotropy, self_similarity
from fastenc.analysis.moments import Moments
from fastenc.analysis.states import TEXTS_AT_ONCE, inner_tokens, visit_texts
from fastenc.data.readers import in_parts, number_of, text_of
from fastenc.data.rows import numbered_rows
from fastenc.models.embedding.encode import vectors_of
from fastenc.models.embedding.space import check_space
from fastenc.models.embedding.standardization import Standardization
from fastenc.models.encoder import Encoder
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.nn.pooling import pool
from fastenc.packing import PackedBatch

SENTENCES_AT_ONCE = 4096  # number of sentences whose words' vectors are in memory together


class ScoredPairs(NamedTuple):
    """Pairs of words or texts, with a human similarity score for each pair."""

    pairs: list[tuple[str, str]]
    scores: list[float]


def read_scored_pairs(
    path: str | Path, columns: Sequence[str] = ("word1", "word2"), score: str = "score"
) -> ScoredPairs:
    """Pairs from a table.

    Args:
        columns: names of the columns of the two words or texts.
        score: name of the scores' column.
    Raises: ValueError with file and line for a missing column, a value that is not text, or a score that is no number.
    """
    pairs, scores = [], []
    for where, row in numbered_rows(path, (*columns, score), "none"):
        one, other = (text_of(row, name, where) for name in columns)
        pairs.append((one, other))
        scores.append(number_of(row[score], where))
    return ScoredPairs(pairs, scores)


@dataclass(frozen=True)
class LayerIsotropy:
    """Isotropy of one layer's token vectors.

    Fields:
        moments: mean and standard deviation of the vectors.
        raw, standardized: isotropy before and after each dimension is standardised.
    """

    moments: Moments
    raw: Isotropy
    standardized: Isotropy


def isotropy_by_layer(
    encoder: Encoder,
    texts: Iterable[str],
    *,
    batch_size: int = 32,
    show_progress: bool | None = False,
) -> list[LayerIsotropy]:
    """Isotropy of the token vectors of texts in each layer, from the embeddings' output to the last layer.

    Special tokens are excluded. The encoder runs over the texts twice, because the second pass needs the standard
    deviations of the first. Only sums are kept in memory.

    Args:
        encoder: a :class:`fastenc.Encoder` with a tokenizer.
    Raises: TooFewData (a ValueError) if the texts have fewer than two tokens, or if all tokens have the same value in a
        dimension of a layer.
    """
    listed, tokenizer = list(texts), encoder.own_tokenizer()
    width, depth = encoder.config.hidden_size, encoder.config.num_layers
    means = [
        LayerIsotropy(Moments.empty(width), Isotropy.empty(width), Isotropy.empty(width))
        for _ in range(depth + 1)
    ]

    def measure(layer: int, state: Tensor, batch: PackedBatch, indices: list[int]) -> None:
        vectors = state[inner_tokens(batch, tokenizer)]
        means[layer].moments.add(vectors)
        means[layer].raw.add(vectors)

    visit_texts(encoder, listed, measure, batch_size=batch_size, show_progress=show_progress)
    standardizations = [_standardization(each.moments, "token") for each in means]

    def measure_again(layer: int, state: Tensor, batch: PackedBatch, indices: list[int]) -> None:
        vectors = state[inner_tokens(batch, tokenizer)]
        means[layer].standardized.add(standardizations[layer](vectors))

    visit_texts(encoder, listed, measure_again, batch_size=batch_size, show_progress=show_progress)
    return means


def sentence_moments(
    encoder: Encoder, texts: Iterable[str], pooling: str | None = None, batch_size: int = 32
) -> Moments:
    """Moments of the texts' vectors, for the standardization that is saved with an encoder:

    ``encoder.sentence = replace(settings, standardization=sentence_moments(...).standardization())``

    The vectors are those of :meth:`fastenc.Encoder.encode`, which cuts texts and puts the default prompt before them,
    without a standardization, linear layers and a scaling to length 1.

    Args: pooling: as ``encode`` takes it. None: the checkpoint's pooling, else "mean".
    """
    vectors = vectors_of(encoder, batch_size=batch_size, pooling=pooling)
    moments = Moments.empty(encoder.config.output_size)
    device = encoder.embeddings.word.weight.device
    first = 0
    with evaluation_mode(encoder), torch.inference_mode():
        for part in in_parts(texts, TEXTS_AT_ONCE):
            for _, batch in vectors.text_batches.of_part(part, first):
                moments.add(encoder.pooled_states(batch.to(device), vectors.pooling))
            first += len(part)
    return moments


class LayerCorrelation(NamedTuple):
    """Spearman's correlation of cosine similarities with human scores.

    Fields:
        raw, standardized: the correlation before and after standardising.
        interval: 95 % interval of ``raw``, by a bootstrap over the pairs.
    """

    raw: float
    standardized: float
    interval: Interval


def correlation_by_layer(
    encoder: Encoder, data: ScoredPairs, *, batch_size: int = 32
) -> list[LayerCorrelation]:
    """Correlation of each layer's cosine similarities with human scores of pairs of words or texts.

    A text's vector is the mean over its tokens, special tokens excluded. Vectors are standardised over all different
    texts of the data.

    Args:
        encoder: a :class:`fastenc.Encoder` with a tokenizer.
    Raises: TooFewData (a ValueError) if all scores are equal, which includes a single pair, or if all texts have the
        same value in a dimension of a layer.
    """
    if len(set(data.scores)) < 2:
        raise TooFewData(
            f"a correlation needs pairs with at least two different scores, got {len(data.scores)} pairs with "
            f"{len(set(data.scores))}: give more pairs"
        )
    texts = sorted({text for pair in data.pairs for text in pair})
    index = {text: position for position, text in enumerate(texts)}
    vectors = vectors_by_layer(encoder, texts, batch_size=batch_size)
    indices = torch.tensor([[index[one], index[other]] for one, other in data.pairs])
    correlations = []
    for raw in vectors:
        moments = Moments.empty(raw.shape[1])
        moments.add(raw)
        scaled = _standardization(moments, "text")(raw)
        before, after = (_cosines(vectors[indices]) for vectors in (raw, scaled))
        correlations.append(
            LayerCorrelation(
                _spearman(before, data.scores),
                _spearman(after, data.scores),
                spearman_interval(before, data.scores),
            )
        )
    return correlations


def _standardization(moments: Moments, what: str) -> Standardization:
    """Raises: TooFewData if all vectors have the same value in a dimension. ``what``: what has a vector."""
    constant = int((moments.std.float() == 0).sum())
    if constant:
        raise TooFewData(
            f"vectors can be standardised if they differ in every dimension, got {moments.count:,} {what} vectors that "
            f"are equal in {constant} of {len(moments.std)}: give more and other texts"
        )
    return moments.standardization()


def vectors_by_layer(encoder: Encoder, texts: Sequence[str], *, batch_size: int = 32) -> Tensor:
    """The mean over each text's tokens in each layer, special tokens excluded: float32 (layers + 1, texts, width).

    Raises: ValueError if the vectors do not fit into memory.
    """
    layers, width = encoder.config.num_layers + 1, encoder.config.hidden_size
    check_space((layers * len(texts), width), torch.float32)
    vectors, tokenizer = torch.empty(layers, len(texts), width), encoder.own_tokenizer()

    def keep(layer: int, state: Tensor, batch: PackedBatch, indices: list[int]) -> None:
        inside = inner_tokens(batch, tokenizer)
        vectors[layer, indices] = mean_of_inner(state, batch, inside).cpu()

    visit_texts(encoder, texts, keep, batch_size=batch_size)
    return vectors


def mean_of_inner(state: Tensor, batch: PackedBatch, inside: Tensor) -> Tensor:
    """The mean over each sequence's inner tokens; of a sequence without any, over all its tokens.

    Args:
        state: (total_tokens, hidden_size).
        inside: bool (total_tokens,), as :func:`fastenc.analysis.states.inner_tokens` gives it.
    Returns: float32 (batch, hidden_size).
    """
    lengths = batch.cu_seqlens.diff()
    counts = F.pad(inside.cumsum(0), (1, 0))[batch.cu_seqlens.long()].diff()
    without = counts == 0
    inside = inside | without.repeat_interleave(lengths, output_size=batch.total_tokens)
    ends = torch.where(without, lengths, counts).cumsum(0)
    return pool(state[inside].float(), F.pad(ends, (1, 0)).int(), "mean")


def _cosines(pairs: Tensor) -> list[float]:
    """The cosine similarity of each pair in (pairs, 2, width)."""
    return F.cosine_similarity(pairs[:, 0], pairs[:, 1], dim=1).tolist()


def _spearman(cosines: Sequence[float], scores: Sequence[float]) -> float:
    """NaN if all cosines are equal."""
    stats = require("scipy.stats", extra="train")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        return float(stats.spearmanr(cosines, scores).statistic)


class FrequencyBin(NamedTuple):
    """Words with a frequency in [low, high): their number and their mean self-similarity.

    ``interval`` is the mean's 95 % interval, by a bootstrap over the words.
    """

    low: int
    high: int
    words: int
    similarity: float
    interval: Interval


def similarity_by_frequency(
    encoder: Encoder,
    sentences: Iterable[Sequence[str]],
    *,
    layer: int = -1,
    batch_size: int = 32,
) -> list[FrequencyBin]:
    """Mean cosine of different occurrences of a word, by the word's frequency, in bins of powers of 2.

    A float64 vector for each different word is held in memory.

    Args:
        encoder: a :class:`fastenc.Encoder` with a tokenizer.
        sentences: sentences as words.
    Returns: [] if no word occurs twice.
    Raises: ValueError if the vectors do not fit into memory.
    """
    listed = list(sentences)
    index: dict[str, int] = {}
    words = torch.tensor(
        [index.setdefault(word.lower(), len(index)) for s in listed for word in s], dtype=torch.long
    )
    check_space((len(index), encoder.config.hidden_size), torch.float64)
    sums = torch.zeros(len(index), encoder.config.hidden_size, dtype=torch.float64)
    start = 0
    for begin in range(0, len(listed), SENTENCES_AT_ONCE):
        vectors = encoder.embed_words(
            listed[begin : begin + SENTENCES_AT_ONCE],
            layers=(layer,),
            batch_size=batch_size,
            show_progress=False,
        ).vectors
        indices = words[start : start + len(vectors)]
        sums.index_add_(0, indices, F.normalize(vectors.double(), dim=1))
        start += len(vectors)
    counts = words.bincount(minlength=len(index))
    similarity = self_similarity(sums, counts)
    similarities = []
    for power in range(1, max(counts.tolist(), default=0).bit_length()):
        chosen = (counts >= 2**power) & (counts < 2 ** (power + 1))
        if chosen.any():
            values = similarity[chosen]
            interval = mean_interval(values.tolist())
            mean = float(values.mean())
            similarities.append(
                FrequencyBin(2**power, 2 ** (power + 1), len(values), mean, interval)
            )
    return similarities
