import pytest
import torch
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from fastenc.data import ClassificationExample, LabelledData
from fastenc.models import EncoderConfig, SequenceClassifier
from fastenc.tasks import SequenceClassification
from fastenc.tasks.metrics import (
    classification_metrics,
    multi_label_metrics,
    regression_metrics,
)


@pytest.mark.parametrize("classes", [2, 4])
def test_classification_metrics_are_scikit_learns(classes):
    predictions, labels = torch.randint(classes, (2, 50)).tolist()
    ours = classification_metrics(predictions, labels, classes)
    assert ours["accuracy"] == accuracy_score(labels, predictions)
    average = "binary" if classes == 2 else "macro"
    assert ours["f1"] == f1_score(labels, predictions, average=average)
    assert ours["mcc"] == matthews_corrcoef(labels, predictions)


def test_a_class_that_never_occurs_counts_in_the_mean():
    predictions, labels = [0, 1, 1, 0], [0, 1, 0, 0]
    ours = classification_metrics(predictions, labels, 3)["f1"]
    assert ours == pytest.approx(2 / 3 * f1_score(labels, predictions, average="macro"))


def test_multi_label_metrics_are_scikit_learns():
    predictions, labels = torch.randint(2, (2, 50, 3)).tolist()
    ours = multi_label_metrics(predictions, [[float(v) for v in row] for row in labels])
    assert ours["micro_f1"] == f1_score(labels, predictions, average="micro")
    assert ours["macro_f1"] == f1_score(labels, predictions, average="macro")
    assert ours["accuracy"] == accuracy_score(labels, predictions)


def test_a_label_that_never_occurs_has_an_f1_of_0():
    ours = multi_label_metrics([[1, 0], [0, 0]], [[1.0, 0.0], [0.0, 0.0]])
    assert ours == {"micro_f1": 1.0, "macro_f1": 0.5, "accuracy": 1.0}
    nothing = multi_label_metrics([[0, 0]], [[0.0, 0.0]])
    assert nothing == {"micro_f1": 0.0, "macro_f1": 0.0, "accuracy": 1.0}


def test_one_label_of_several_is_no_class_of_two():
    ours = multi_label_metrics([[1], [0], [1], [0]], [[1.0], [0.0], [0.0], [0.0]])
    assert ours["micro_f1"] == ours["macro_f1"] == pytest.approx(2 / 3)


def test_regression_metrics_are_scipys():
    for a, b in (torch.randn(2, 30).tolist(), ([0.0, 1.0, 1.0], [3.0, 5.0, 3.0])):
        assert regression_metrics(a, b) == {
            "pearson": stats.pearsonr(a, b).statistic,
            "spearman": stats.spearmanr(a, b).statistic,
        }
    for constant in (([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0, 1.0]), ([1.0], [2.0]), ([], [])):
        assert regression_metrics(*constant) == {"pearson": 0.0, "spearman": 0.0}


def test_predictions_keep_the_order_whatever_the_batches():
    config = EncoderConfig(
        vocab_size=50, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32
    )
    model = SequenceClassifier(config, num_labels=3).eval()
    lengths = (4, 9, 2, 17, 5, 5, 30)
    examples = [
        ClassificationExample(torch.randint(50, (n,)).tolist(), [0] * n, n % 3) for n in lengths
    ]
    task = SequenceClassification()
    predict = lambda chosen, size=32: task.predict_encoded(model, None, chosen, size)
    alone = torch.cat([predict([example]) for example in examples])
    torch.testing.assert_close(predict(examples, 2), alone, rtol=0, atol=1e-5)
    labels = torch.tensor([example.label for example in examples])
    data = LabelledData(["a text"] * len(lengths), labels.tolist(), ["a", "b", "c"])
    metrics = task.evaluate(model, data, examples, 3)
    assert metrics["loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(alone, labels).item(), rel=1e-4
    )
    assert metrics["accuracy"] == pytest.approx((alone.argmax(1) == labels).double().mean().item())
    assert predict([]).shape == (0, 3)
