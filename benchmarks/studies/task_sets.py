"""The labelled data sets that fine-tuning is measured on: their files, task and metric."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastenc.tasks import (
    QuestionAnswering,
    SequenceClassification,
    SpanNer,
    Task,
    TokenClassification,
)

PAIR = ("sentence1", "sentence2")


@dataclass(frozen=True)
class TaskSet:
    """A data set under the folder ``FASTENC_DATA``.

    Fields:
        task: reads the files and defines what is learned.
        train, dev, test: files; several are joined. Without dev files, every tenth training example is held out to
            choose the epoch. Without test files, the dev score is reported.
        most: with more training examples, this number of evenly spaced ones is taken: a laptop trains on it in minutes.
    """

    title: str
    metric: str
    task: Task
    train: tuple[str, ...]
    dev: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    most: int | None = None

    def read(self, limit: int | None = None) -> tuple[Any, Any, Any]:
        """(train, dev, test), at most ``limit`` evenly spaced examples of each; test is None without test files."""
        train = self._join(self.train)
        if self.most is not None and len(train) > self.most:
            train = _chosen(train, [len(train) * i // self.most for i in range(self.most)])
        if self.dev:
            dev = self._join(self.dev, train)
        else:
            kept = [index for index in range(len(train)) if index % 10]
            train, dev = _chosen(train, kept), _chosen(train, range(0, len(train), 10))
        test = self._join(self.test, train) if self.test else None
        if limit is None:
            return train, dev, test
        some = lambda data: data and _chosen(data, range(0, len(data), -(-len(data) // limit)))
        return some(train), some(dev), some(test)

    def _join(self, names: tuple[str, ...], train: Any = None) -> Any:
        folder = Path(os.environ["FASTENC_DATA"])
        first, *others = names
        whole = self.task.read(folder / first, train)
        for name in others:
            more = self.task.read(folder / name, train or whole)
            whole = _appended(whole, more)
        return whole


def _lists(data: Any) -> dict[str, list]:
    """The fields of a data set that have an entry for every example."""
    names = ("sentences", "entities", "texts", "labels", "where")
    return {name: getattr(data, name) for name in names if hasattr(data, name)}


def _chosen(data: Any, indices: Any) -> Any:
    if isinstance(data, list):  # questions
        return [data[i] for i in indices]
    return replace(data, **{n: [values[i] for i in indices] for n, values in _lists(data).items()})


def _appended(data: Any, more: Any) -> Any:
    added = _lists(more)
    return replace(data, **{name: [*values, *added[name]] for name, values in _lists(data).items()})


def _splits(folder: str, suffix: str) -> dict[str, tuple[str, ...]]:
    return {split: (f"{folder}/{split}.{suffix}.gz",) for split in ("train", "dev", "test")}


SETS = {
    "sst2": TaskSet(
        "SST-2",
        "accuracy",
        SequenceClassification(),
        ("sst2/train.tsv.gz",),
        ("sst2/dev.tsv.gz",),
    ),
    "sst2-5000": TaskSet(
        "SST-2, 5,000 phrases",
        "accuracy",
        SequenceClassification(),
        ("sst2/train.tsv.gz",),
        ("sst2/dev.tsv.gz",),
        most=5000,
    ),
    "cola": TaskSet(
        "CoLA",
        "mcc",
        SequenceClassification(),
        ("cola/in_domain_train.tsv.gz",),
        ("cola/in_domain_dev.tsv.gz", "cola/out_of_domain_dev.tsv.gz"),
    ),
    "mrpc": TaskSet("MRPC", "f1", SequenceClassification(text=PAIR), **_splits("mrpc", "tsv")),
    "rte": TaskSet(
        "RTE",
        "accuracy",
        SequenceClassification(text=("premise", "hypothesis"), max_length=256),
        ("rte/dev.tsv.gz",),
        test=("rte/test.tsv.gz",),
    ),
    "stsb": TaskSet(
        "STS-B",
        "spearman",
        SequenceClassification(text=PAIR, label="score", regression=True),
        ("stsb/en_train.tsv.gz",),
        ("stsb/en_dev.tsv.gz",),
        ("stsb/en_test.tsv.gz",),
    ),
    "snli-cad": TaskSet(
        "SNLI-CAD, 4,000 pairs",
        "accuracy",
        SequenceClassification(text=PAIR, label="gold_label"),
        *(
            (f"snli_cad/original_{split}.tsv.gz", f"snli_cad/revised_{split}.tsv.gz")
            for split in ("train", "dev", "test")
        ),
        most=4000,
    ),
    "ag-news": TaskSet(
        "AG News, 4,000 texts",
        "accuracy",
        SequenceClassification(text=("text",)),
        ("ag_news/train_slice.tsv.gz",),
        test=("ag_news/test.tsv.gz",),
        most=4000,
    ),
    "wnut17": TaskSet(
        "WNUT-17", "f1", TokenClassification(max_length=256), **_splits("wnut17", "conll")
    ),
    "ud-pos": TaskSet(
        "UD English EWT, UPOS, 4,000 sentences",
        "accuracy",
        TokenClassification(max_length=256),
        **_splits("ud_english_ewt", "conllu"),
        most=4000,
    ),
    "germeval": TaskSet(
        "GermEval 2014 with nested entities, 4,000 sentences",
        "f1",
        SpanNer(max_length=256, inner_tag_column=3),
        **_splits("germeval2014_nested", "conll"),
        most=4000,
    ),
    "squad": TaskSet(
        "SQuAD v1.1, 2,000 questions",
        "f1",
        QuestionAnswering(),
        ("squad_v1.1_dev/train_articles.json.gz",),
        test=("squad_v1.1_dev/eval_articles.json.gz",),
        most=2000,
    ),
    "squad2": TaskSet(
        "SQuAD v2.0, 2,000 questions",
        "f1",
        QuestionAnswering(),
        ("squad_v2.0_dev/train_articles.json.gz",),
        test=("squad_v2.0_dev/eval_articles.json.gz",),
        most=2000,
    ),
}
