"""Word senses by the nearest mean vectors of MiniLM, compared with baselines.

python -m benchmarks.studies.word_senses [coarse] [all-words] [wic]    (needs FASTENC_DATA; minutes)

Stored results of other tasks are kept.

coarse: CoarseWSD-20, accuracy over all rows (micro) and as the mean over words (macro). all-words: Senseval-2 and
SemEval-2013 with SemCor's senses, F1. wic: same sense or not, by a threshold on the cosine. The layers are chosen on a
tenth of the training rows, and for WiC layer and threshold on dev; never on test rows. Baselines: a lemma's most
frequent sense in the training rows; for each lemma, multinomial naive Bayes on the sentence's words and word pairs
(scikit-learn).
"""

import gzip
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.naive_bayes import MultinomialNB

from benchmarks._results import read_cases, write
from fastenc.data.senses import SenseData
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import Encoder
from fastenc.models.embedding.word_vectors import LAYERS
from fastenc.tasks import SensePrediction, WordSense
from fastenc.tasks.word_sense import accuracy_by_lemma, sense_metrics

ALL_WORDS = ("senseval2", "semeval2013_en")


def main() -> None:
    chosen = sys.argv[1:] or ["coarse", "all-words", "wic"]
    data = Path(os.environ["FASTENC_DATA"])
    cases: dict = {}
    if "coarse" in chosen:
        folder = data / "coarsewsd20"
        train = WordSense().read(folder / "train.tsv.gz")
        cases |= compare("CoarseWSD-20", train, {"": folder / "test.tsv.gz"}, words=True)
    if "all-words" in chosen:
        folder = data / "wsd_allwords"
        train = WordSense().read(folder / "semcor_all_words.tsv.gz")
        tests = {f", {name}": folder / f"{name}.tsv.gz" for name in ALL_WORDS}
        cases |= compare("all words, senses of SemCor", train, tests, words=False)
    if "wic" in chosen:
        cases |= word_in_context(data / "wic")
    write("word_senses", {**read_cases("word_senses"), **cases})


def compare(title: str, train: SenseData, tests: dict[str, Path], words: bool) -> dict:
    """A case for each test set."""
    kept, held_out = split(train)
    providers = {
        "most frequent sense": lambda test: most_frequent(train, test),
        "naive Bayes": lambda test: naive_bayes(train, test),
    }
    last = WordSense(word_layers=",".join(map(str, LAYERS)))
    for name, task, dev in (("last four layers", last, None), ("chosen", WordSense(), held_out)):
        model = task.load(minilm_folder(), train)
        task.fit(model, kept if dev else train, dev)
        label = f"MiniLM, {name}" + (f" (layers {model.layers})" if dev else "")
        providers[label] = lambda test, task=task, model=model: task.predict(model, test)
    cases: dict = {}
    for suffix, path in tests.items():
        test = WordSense().read(path)
        rows = cases[f"{title}{suffix}, {len(test):,} words"] = {}
        for provider, predict in providers.items():
            predictions = predict(test)
            row = rows[provider] = dict(sense_metrics(test, predictions))
            if words:
                shares = accuracy_by_lemma(test, predictions)
                row["words"] = {word: share for word, (share, _) in sorted(shares.items())}
    return cases


def split(data: SenseData) -> tuple[SenseData, SenseData]:
    """Nine tenths and a tenth of the targets."""
    targets = [t for i, t in enumerate(data.targets) if i % 10], data.targets[::10]
    kept, held_out = (SenseData(data.sentences, each, data.path) for each in targets)
    return kept, held_out


def most_frequent(train: SenseData, test: SenseData) -> list[SensePrediction]:
    counts: dict[str, Counter] = {}
    for target in train.targets:
        counts.setdefault(target.lemma, Counter()).update(target.senses)
    first = lambda lemma: counts[lemma].most_common(1)[0][0] if lemma in counts else None
    return [SensePrediction(first(target.lemma), {}) for target in test.targets]


def naive_bayes(train: SenseData, test: SenseData) -> list[SensePrediction]:
    """Naive Bayes for each lemma; a lemma with at most one sense in training gets that sense."""
    predictions = most_frequent(train, test)
    rows: dict[str, list] = {}
    for target in train.targets:
        rows.setdefault(target.lemma, []).append(target)
    wanted: dict[str, list[int]] = {}
    for index, target in enumerate(test.targets):
        wanted.setdefault(target.lemma, []).append(index)
    for lemma, indices in wanted.items():
        own = rows.get(lemma, [])
        if len({target.senses[0] for target in own}) < 2:
            continue
        vectorizer = CountVectorizer(analyzer="word", token_pattern=r"\S+", ngram_range=(1, 2))
        text = lambda data, target: " ".join(data.sentences[target.sentence])
        features = vectorizer.fit_transform([text(train, target) for target in own])
        model = MultinomialNB().fit(features, [target.senses[0] for target in own])
        texts = [text(test, test.targets[index]) for index in indices]
        for index, sense in zip(indices, model.predict(vectorizer.transform(texts)), strict=True):
            predictions[index] = SensePrediction(sense, {})
    return predictions


def word_in_context(folder: Path) -> dict:
    """Accuracy of a threshold on the cosine; threshold and layer are chosen on dev."""
    encoder = Encoder.from_pretrained(minilm_folder())
    sets = {name: read_pairs(folder / f"{name}.tsv.gz") for name in ("dev", "test")}
    best: tuple = (-1.0,)
    for layers in (LAYERS, *((layer,) for layer in range(encoder.config.num_layers + 1))):
        cosines = {name: cosines_of(encoder, rows, layers) for name, rows in sets.items()}
        labels = {name: np.array([row[4] for row in rows]) for name, rows in sets.items()}
        for threshold in np.unique(cosines["dev"]):
            share = float(((cosines["dev"] >= threshold) == labels["dev"]).mean())
            if share > best[0]:
                test = float(((cosines["test"] >= threshold) == labels["test"]).mean())
                best = (share, test, list(layers), float(threshold))
    share, test, layers, threshold = best
    majority = float(max(labels["test"].mean(), 1 - labels["test"].mean()))
    rows: dict = {"majority": {"accuracy": majority}}
    rows[f"MiniLM (layers {layers}, threshold {threshold:.3f})"] = {"accuracy": test, "dev": share}
    return {f"WiC test, {len(sets['test']):,} pairs": rows}


def read_pairs(path: Path) -> list[tuple]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        _, *lines = (line.rstrip("\n").split("\t") for line in file)
    return [(int(i), int(j), one, other, label == "T") for _, _, i, j, one, other, label in lines]


def cosines_of(encoder: Encoder, rows: list[tuple], layers: tuple[int, ...]) -> np.ndarray:
    sides = []
    for side in (0, 1):
        vectors = encoder.embed_words([row[2 + side] for row in rows], layers=layers)
        sides.append(torch.stack([vectors[i][row[side]] for i, row in enumerate(rows)]))
    return F.cosine_similarity(*sides, dim=1).numpy()


if __name__ == "__main__":
    main()
