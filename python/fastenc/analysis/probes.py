"""What each layer knows: linear probes on its vectors, and control tasks that tell knowledge from memory."""

import hashlib
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastenc._extras import require


class LabelledWords(NamedTuple):
    """Sentences, and a label for each word; None for a word that has none.

    Fields:
        control_keys: for each word, what the random label of a control task belongs to; None: the words.
    """

    sentences: list[list[str]]
    labels: list[list[str | None]]
    control_keys: list[list[str]] | None = None


class ProbeScore(NamedTuple):
    """Of one layer.

    Fields:
        accuracy: of a linear probe on test words.
        control: of one that learns random labels, the same for every occurrence of a word (or its control key).
    """

    accuracy: float
    control: float

    @property
    def selectivity(self) -> float:
        """accuracy - control: high where the layer knows, low where the probe only remembers words."""
        return self.accuracy - self.control


def majority_accuracy(train: LabelledWords, test: LabelledWords) -> float:
    """Of always predicting the most frequent label of training."""
    numpy = require("numpy", extra="train")
    seen = [label for row in train.labels for label in row if label is not None]
    asked = [label for row in test.labels for label in row if label is not None]
    names, counts = numpy.unique(seen, return_counts=True)
    return float((numpy.asarray(asked) == names[counts.argmax()]).mean())


def probe_by_layer(
    encoder: Any,
    train: LabelledWords,
    test: LabelledWords,
    *,
    cache: str | Path | None = None,
    max_words: int = 20_000,
    seed: int = 0,
    iterations: int = 100,
) -> list[ProbeScore]:
    """Accuracy of a linear probe on every layer's word vectors, from the embeddings' output to the last layer.

    The probe is scikit-learn's logistic regression on standardised vectors. In the control task each different word
    (or control key) has a label of its own, drawn from the labels' distribution, so that only a memory of words can
    learn it.

    Args:
        train, test: every label of test must be in train.
        cache: folder for the vectors of all layers, computed once; None: a temporary one.
        max_words: labelled words of training that are used, the first.
        seed: of the control task's labels.
        iterations: of the probe's optimiser, at most.
    Raises: ValueError for labels that do not fit their sentences, one label alone, or a label that only test has.
    Source: Hewitt and Liang 2019, arXiv:1909.03368.
    """
    numpy = require("numpy", extra="train")
    for data in (train, test):
        for words, labels, *_ in _rows(data):
            if len(words) != len(labels):
                raise ValueError(
                    f"a sentence of {len(words)} words has {len(labels)} labels: give one a word, or None"
                )
    own = [chosen_words(train, max_words), chosen_words(test, max_words)]
    names = sorted({label for label in own[0].labels})
    if len(names) < 2:
        raise ValueError(f"a probe needs two labels or more in training, got {names}")
    if missing := {label for label in own[1].labels} - set(names):
        raise ValueError(
            f"the label {min(missing)!r} is in test alone: add words with it to training"
        )
    known, counts = numpy.unique(own[0].labels, return_counts=True)
    controls = [_control(each.keys, known, counts, seed) for each in own]
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
            for name, data in zip(("train", "test"), own, strict=True)
        ]
        scores = []
        for layer in range(depth + 1):
            width = encoder.config.hidden_size
            columns = slice(layer * width, (layer + 1) * width)
            x = [
                each[data.rows, columns].astype("float64")
                for each, data in zip(vectors, own, strict=True)
            ]
            mean, std = x[0].mean(0), x[0].std(0) + 1e-12
            x = [(each - mean) / std for each in x]
            scores.append(
                ProbeScore(
                    *(
                        _accuracy(x, labels, iterations)
                        for labels in ([each.labels for each in own], controls)
                    )
                )
            )
        del vectors
    return scores


class ChosenWords(NamedTuple):
    """The sentences up to a number of labelled words, those words' control keys, rows among all, and labels."""

    sentences: list[list[str]]
    keys: list[str]
    rows: list[int]
    labels: list[str]


def chosen_words(data: LabelledWords, most: int) -> ChosenWords:
    sentences: list[list[str]] = []
    keys: list[str] = []
    rows: list[int] = []
    chosen: list[str] = []
    row = 0
    for sentence, labels, own_keys in _rows(data):
        if len(chosen) >= most:
            break
        sentences.append(sentence)
        for key, label in zip(own_keys, labels, strict=True):
            if label is not None:
                keys.append(key)
                rows.append(row)
                chosen.append(label)
            row += 1
    return ChosenWords(sentences, keys, rows, chosen)


def _rows(data: LabelledWords) -> Any:
    """(words, labels, control keys) of each sentence."""
    return zip(data.sentences, data.labels, data.control_keys or data.sentences, strict=True)


def _control(words: Sequence[str], names: Any, counts: Any, seed: int) -> list[str]:
    """A label for each different word, drawn by the labels' frequencies from a hash of seed and word."""
    numpy = require("numpy", extra="train")
    bounds = counts.cumsum() / counts.sum()

    def label(word: str) -> str:
        digest = hashlib.blake2b(f"{seed} {word}".encode(), digest_size=8).digest()
        uniform = int.from_bytes(digest, "little") / 2**64
        return str(names[min(int(numpy.searchsorted(bounds, uniform, "right")), len(names) - 1)])

    known: dict[str, str] = {}
    return [known.setdefault(word, label(word)) for word in words]


def _accuracy(x: Sequence[Any], labels: Sequence[Sequence[str]], iterations: int) -> float:
    linear_model = require("sklearn.linear_model", extra="train")
    exceptions = require("sklearn.exceptions", extra="train")
    if len(set(labels[0])) < 2:  # a control task of few words
        return float(sum(a == labels[0][0] for a in labels[1]) / len(labels[1]))
    model = linear_model.LogisticRegression(max_iter=iterations)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", exceptions.ConvergenceWarning)
        model.fit(x[0], labels[0])
    return float(model.score(x[1], labels[1]))
