"""Linear probes: what each layer's vectors encode, with control tasks that measure how much a probe memorises."""

import hashlib
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastenc._base.extras import require
from fastenc.models.encoder import Encoder

if TYPE_CHECKING:
    import numpy as np


class LabelledWords(NamedTuple):
    """Sentences as words, with a label for each word.

    Fields:
        labels: None for a word without a label.
        control_keys: for each word, the key of its random label in the control task; None: the word itself is the key.
    """

    sentences: list[list[str]]
    labels: list[list[str | None]]
    control_keys: list[list[str]] | None = None


class ProbeScore(NamedTuple):
    """The score of one layer.

    Fields:
        accuracy: test accuracy of a linear probe.
        control: test accuracy of a probe that learns random labels; all occurrences of a control key have the same.
        words: number of labelled words in the test set.
    """

    accuracy: float
    control: float
    words: int

    @property
    def selectivity(self) -> float:
        """accuracy - control: low if the probe only memorises words, high if the layer encodes the labels."""
        return self.accuracy - self.control


def majority_accuracy(train: LabelledWords, test: LabelledWords) -> float:
    """Test accuracy of always predicting the most frequent label of the training set."""
    numpy = require("numpy", extra="train")
    known = [label for row in train.labels for label in row if label is not None]
    wanted = [label for row in test.labels for label in row if label is not None]
    names, counts = numpy.unique(known, return_counts=True)
    return float((numpy.asarray(wanted) == names[counts.argmax()]).mean())


def probe_by_layer(
    encoder: Encoder,
    train: LabelledWords,
    test: LabelledWords,
    *,
    cache: str | Path | None = None,
    max_words: int = 20_000,
    seed: int = 0,
    iterations: int = 100,
) -> list[ProbeScore]:
    """Accuracy of a linear probe on every layer's word vectors, from the embeddings' output to the last layer.

    The probe is scikit-learn's logistic regression on standardised vectors. In the control task, each word (or control
    key) has a random label, sampled from the distribution of the labels. A probe can learn it only by memorising words.

    Args:
        encoder: a :class:`fastenc.Encoder` with a tokenizer.
        train, test: labelled words. Every label of ``test`` must also be in ``train``.
        cache: folder for the vectors of all layers; None: a temporary folder.
        max_words: largest number of labelled words of each set; the first ones are used.
        seed: seed of the control task's labels.
        iterations: largest number of iterations of the probe's optimiser.
    Returns: a score for each layer.
    Raises: ValueError if a sentence has another number of labels than words, if there are fewer than two labels, or
        for a label that only ``test`` has.
    Source: Hewitt and Liang 2019, arXiv:1909.03368.
    """
    numpy = require("numpy", extra="train")
    for data in (train, test):
        for words, labels, *_ in _rows(data):
            if len(words) != len(labels):
                raise ValueError(
                    f"a sentence must have a label or None for each of its {len(words)} words, got {len(labels)} "
                    "labels: correct them"
                )
    sets = [chosen_words(train, max_words), chosen_words(test, max_words)]
    names = sorted({label for label in sets[0].labels})
    if len(names) < 2:
        raise ValueError(
            f"a probe needs at least two different labels in training, got {names}: give more labelled words"
        )
    if missing := {label for label in sets[1].labels} - set(names):
        raise ValueError(
            f"every label of test must be in training, got {min(missing)!r}: add words with it to training"
        )
    known, counts = numpy.unique(sets[0].labels, return_counts=True)
    controls = [_control(each.keys, known, counts, seed) for each in sets]
    depth = encoder.config.num_layers
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(cache or scratch)
        vectors = [
            encoder.embed_words(
                data.sentences,
                layers=range(depth + 1),
                combine="concat",
                out=folder / f"{name}.npy",
                show_progress=False,
            ).vectors.numpy()
            for name, data in zip(("train", "test"), sets, strict=True)
        ]
        scores = []
        for layer in range(depth + 1):
            width = encoder.config.hidden_size
            columns = slice(layer * width, (layer + 1) * width)
            x = [
                each[data.rows, columns].astype("float64")
                for each, data in zip(vectors, sets, strict=True)
            ]
            mean, std = x[0].mean(0), x[0].std(0) + 1e-12
            x = [(each - mean) / std for each in x]
            accuracy, control = (
                _accuracy(x, labels, iterations)
                for labels in ([each.labels for each in sets], controls)
            )
            scores.append(ProbeScore(accuracy, control, len(sets[1].labels)))
        del vectors
    return scores


class ChosenWords(NamedTuple):
    """The first labelled words of a data set.

    Fields:
        sentences: the sentences with these words.
        keys, labels: control key and label of each labelled word.
        rows: index of each labelled word among all words of the sentences.
    """

    sentences: list[list[str]]
    keys: list[str]
    rows: list[int]
    labels: list[str]


def chosen_words(data: LabelledWords, most: int) -> ChosenWords:
    """The first sentences of a data set, until they have ``most`` labelled words or more."""
    sentences: list[list[str]] = []
    keys: list[str] = []
    rows: list[int] = []
    chosen: list[str] = []
    row = 0
    for sentence, labels, sentence_keys in _rows(data):
        if len(chosen) >= most:
            break
        sentences.append(sentence)
        for key, label in zip(sentence_keys, labels, strict=True):
            if label is not None:
                keys.append(key)
                rows.append(row)
                chosen.append(label)
            row += 1
    return ChosenWords(sentences, keys, rows, chosen)


def _rows(data: LabelledWords) -> Iterable[tuple[list[str], list[str | None], list[str]]]:
    """(words, labels, control keys) of each sentence."""
    return zip(data.sentences, data.labels, data.control_keys or data.sentences, strict=True)


def _control(
    words: Sequence[str], names: "np.ndarray", counts: "np.ndarray", seed: int
) -> list[str]:
    """A random label for each word: sampled from the labels' distribution, with a hash of seed and word."""
    numpy = require("numpy", extra="train")
    bounds = counts.cumsum() / counts.sum()

    def label(word: str) -> str:
        digest = hashlib.blake2b(f"{seed} {word}".encode(), digest_size=8).digest()
        uniform = int.from_bytes(digest, "little") / 2**64
        return str(names[min(int(numpy.searchsorted(bounds, uniform, "right")), len(names) - 1)])

    known: dict[str, str] = {}
    return [known.setdefault(word, label(word)) for word in words]


def _accuracy(x: Sequence[Any], labels: Sequence[Sequence[str]], iterations: int) -> float:
    """Test accuracy of a logistic regression. ``x`` and ``labels`` are of training and test."""
    linear_model = require("sklearn.linear_model", extra="train")
    exceptions = require("sklearn.exceptions", extra="train")
    if len(set(labels[0])) < 2:  # in a control task with few words, all may have the same label
        return float(sum(a == labels[0][0] for a in labels[1]) / len(labels[1]))
    model = linear_model.LogisticRegression(max_iter=iterations)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", exceptions.ConvergenceWarning)
        model.fit(x[0], labels[0])
    return float(model.score(x[1], labels[1]))
