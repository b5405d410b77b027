"""Metrics of classification, regression and labelling, by scikit-learn, scipy and seqeval."""

from collections.abc import Sequence

from fastenc._extras import require


def classification_metrics(
    predictions: Sequence[int], labels: Sequence[int], num_labels: int
) -> dict[str, float]:
    """accuracy, f1 (of class 1 for two classes, macro for more) and mcc (Matthews correlation), each at most 1."""
    sklearn = require("sklearn.metrics", extra="train")
    average = "binary" if num_labels == 2 else "macro"
    classes = None if num_labels == 2 else list(range(num_labels))
    return {
        "accuracy": float(sklearn.accuracy_score(labels, predictions)),
        "f1": float(
            sklearn.f1_score(labels, predictions, average=average, labels=classes, zero_division=0)
        ),
        "mcc": float(sklearn.matthews_corrcoef(labels, predictions)),
    }


def multi_label_metrics(
    predictions: Sequence[Sequence[bool]], labels: Sequence[Sequence[float]]
) -> dict[str, float]:
    """micro_f1, macro_f1, and accuracy: the share of texts whose labels are all right; (texts, num_labels) each."""
    sklearn = require("sklearn.metrics", extra="train")
    truth = [[bool(value) for value in row] for row in labels]
    f1 = lambda average: float(
        sklearn.f1_score(truth, predictions, average=average, zero_division=0)
    )
    return {
        "micro_f1": f1("micro"),
        "macro_f1": f1("macro"),
        "accuracy": float(sklearn.accuracy_score(truth, predictions)),
    }


def regression_metrics(predictions: Sequence[float], targets: Sequence[float]) -> dict[str, float]:
    """Pearson and Spearman correlation; 0 where a constant input leaves them undefined."""
    stats = require("scipy.stats", extra="train")
    if len(set(predictions)) < 2 or len(set(targets)) < 2:
        return {"pearson": 0.0, "spearman": 0.0}
    return {
        "pearson": float(stats.pearsonr(predictions, targets).statistic),
        "spearman": float(stats.spearmanr(predictions, targets).statistic),
    }


def tagging_metrics(
    predictions: Sequence[Sequence[str]], labels: Sequence[Sequence[str]], *, entities: bool
) -> dict[str, float]:
    """accuracy over words and, of entity tags (IOB2, BIOES), precision, recall and f1 over whole entities: micro
    averages by seqeval, with conlleval's reading of tags that break their scheme's rules; 0 without entities."""
    right = [
        one == two
        for p, y in zip(predictions, labels, strict=True)
        for one, two in zip(p, y, strict=True)
    ]
    metrics = {"accuracy": sum(right) / max(len(right), 1)}
    if not entities:
        return metrics
    seqeval = require("seqeval.metrics", extra="train")
    scores = {
        "f1": seqeval.f1_score,
        "precision": seqeval.precision_score,
        "recall": seqeval.recall_score,
    }
    found = {name: float(f(labels, predictions, zero_division=0)) for name, f in scores.items()}
    return {**found, **metrics}
