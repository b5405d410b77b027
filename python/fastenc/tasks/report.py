"""Files that show where a model is right and wrong: metrics of each class, a confusion matrix, and the mistakes."""

from collections import Counter
from collections.abc import Iterable, Sequence

from fastenc._base.extras import require
from fastenc.text.tags import Span

Report = dict[str, Iterable[str]]  # name of a file → its lines
CLASSES, CONFUSION, MISTAKES = "classes.tsv", "confusion.tsv", "mistakes.jsonl"


def class_figures(
    gold: Sequence[object], predicted: Sequence[object], names: Sequence[str]
) -> list[str]:
    """Lines of a table with precision, recall, F1 and number of true items of each class, by scikit-learn.

    A ratio with the denominator 0 is 0.

    Args:
        gold, predicted: for each item a class index, or for multi-label a row of 0 and 1.
        names: name of each class.
    """
    sklearn = require("sklearn.metrics", extra="train")
    columns = sklearn.precision_recall_fscore_support(
        gold, predicted, labels=list(range(len(names))), average=None, zero_division=0
    )
    return _table(names, columns)


def entity_figures(
    gold: Sequence[Iterable[Span]], predicted: Sequence[Iterable[Span]]
) -> list[str]:
    """The same table for entities, by type. A predicted entity is right if its type, first and last word are.

    Args:
        gold, predicted: the entities of each sentence.
    """
    right: Counter = Counter()
    predictions: Counter = Counter()
    expected: Counter = Counter()
    for truth, entities in zip(map(set, gold), map(set, predicted), strict=True):
        right.update(entity.type for entity in truth & entities)
        predictions.update(entity.type for entity in entities)
        expected.update(entity.type for entity in truth)
    names = sorted(predictions | expected)
    precision = [right[name] / max(predictions[name], 1) for name in names]
    recall = [right[name] / max(expected[name], 1) for name in names]
    f1 = [2 * right[name] / max(predictions[name] + expected[name], 1) for name in names]
    return _table(names, (precision, recall, f1, [expected[name] for name in names]))


def confusion_matrix(
    gold: Sequence[object], predicted: Sequence[object], names: Sequence[str]
) -> list[str]:
    """Lines of a table with a row for each true class and a column for each predicted one."""
    counts = Counter(zip(gold, predicted, strict=True))
    lines = ["\t".join(["true \\ predicted", *names])]
    for row, name in enumerate(names):
        lines.append("\t".join([name, *(str(counts[row, column]) for column in range(len(names)))]))
    return lines


def _table(names: Sequence[str], columns: Sequence[Sequence[float]]) -> list[str]:
    lines = ["class\tprecision\trecall\tf1\tnumber"]
    for name, *figures, number in zip(names, *columns, strict=True):
        lines.append("\t".join([name, *(f"{figure:.4f}" for figure in figures), str(int(number))]))
    return lines
