"""Fine-tunes MiniLM to predict the package of a docstring, and compares it with two baselines."""

from collections import Counter
from pathlib import Path

from fastenc._base.extras import require
from fastenc.data import LabelledData
from fastenc.demo.checkpoint import minilm_folder
from fastenc.tasks import SequenceClassification
from fastenc.train import TrainConfig, task_trainer
from fastenc.train.log import read_log

MAX_LENGTH, TRAINING, HELD_OUT = 64, 1800, 1000  # tokens of a text; numbers of texts

Pairs = list[tuple[str, str]]


def run(training_pairs: Pairs, held_out_pairs: Pairs, folder: Path) -> dict:
    """Fine-tune on (text, package) pairs, and measure the accuracy on held-out pairs.

    Returns: accuracies of the majority class, a bag of words and the fine-tuned model; names of the classes; numbers of
        texts; lines of the log.
    """
    names = sorted({package for _, package in training_pairs})
    as_data = lambda pairs: LabelledData(
        [text for text, _ in pairs], [names.index(package) for _, package in pairs], names
    )
    training, held_out = as_data(training_pairs[:TRAINING]), as_data(held_out_pairs[:HELD_OUT])
    task = SequenceClassification(max_length=MAX_LENGTH)
    model = task.load(minilm_folder(), training)
    config = TrainConfig(str(folder), epochs=3, batch_size=32, learning_rate=2e-4)
    trainer = task_trainer(task, model, training, config, dev=held_out)
    metrics = trainer.train()
    return {
        "accuracies": {
            "majority class": _majority(training, held_out),
            "bag of words": _bag_of_words(training, held_out),
            "fine-tuned MiniLM": metrics["accuracy"],
        },
        "classes": names,
        "training": len(training),
        "held_out": len(held_out),
        "log": read_log(folder / "log.jsonl"),
    }


def _majority(training: LabelledData, held_out: LabelledData) -> float:
    """Accuracy of always predicting the most frequent class."""
    (common, _), *_ = Counter(training.labels).most_common(1)
    return sum(label == common for label in held_out.labels) / len(held_out)


def _bag_of_words(training: LabelledData, held_out: LabelledData) -> float:
    """Accuracy of a logistic regression on TF-IDF features."""
    text = require("sklearn.feature_extraction.text", extra="demo")
    linear = require("sklearn.linear_model", extra="demo")
    pipeline = require("sklearn.pipeline", extra="demo")
    model = pipeline.make_pipeline(
        text.TfidfVectorizer(sublinear_tf=True, min_df=2),
        linear.LogisticRegression(max_iter=1000, C=10),
    )
    model.fit(training.texts, training.labels)
    return float(model.score(held_out.texts, held_out.labels))
