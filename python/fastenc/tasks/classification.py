"""Evaluating and predicting with a sequence classifier."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastenc.data import BatchSampler, ClassificationExample, collate_classification
from fastenc.data.progress import progress_bar
from fastenc.models import SequenceClassifier
from fastenc.tasks.metrics import classification_metrics, regression_metrics


@torch.inference_mode()
def predict_logits(
    model: SequenceClassifier,
    examples: Sequence[ClassificationExample],
    batch_size: int = 32,
    show_progress: bool | None = False,
) -> Tensor:
    """(len(examples), num_labels) float32 on the CPU, in the examples' order; batches are formed by length."""
    device = next(model.parameters()).device
    logits = torch.empty((len(examples), len(model.label_names)))
    if not examples:
        return logits
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].input_ids), reverse=True)
    batches = BatchSampler(order, batch_size, shuffle=False).epoch(0)
    was_training = model.training
    model.eval()
    for places in progress_bar(list(batches), "predicting", "batch", show_progress):
        chosen = [order[place] for place in places]
        batch = collate_classification([examples[i] for i in chosen])["batch"].to(device)
        logits[chosen] = model(batch).logits.float().cpu()
    model.train(was_training)
    return logits


def evaluate_classifier(
    model: SequenceClassifier, examples: Sequence[ClassificationExample], batch_size: int = 32
) -> dict[str, float]:
    """loss, and accuracy, f1, mcc; pearson, spearman for a regression."""
    logits = predict_logits(model, examples, batch_size)
    if model.problem_type == "regression":
        targets = torch.tensor([example.label for example in examples], dtype=torch.float32)
        loss = torch.nn.functional.mse_loss(logits[:, 0], targets)
        return {"loss": loss.item(), **regression_metrics(logits[:, 0].tolist(), targets.tolist())}
    labels = torch.tensor([example.label for example in examples])
    loss = torch.nn.functional.cross_entropy(logits, labels)
    predicted = logits.argmax(1).tolist()
    return {
        "loss": loss.item(),
        **classification_metrics(predicted, labels.tolist(), logits.shape[1]),
    }
