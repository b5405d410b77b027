"""Predictions, losses and metrics of the tasks."""

from fastenc.tasks.classification import evaluate_classifier, predict_logits
from fastenc.tasks.masked_lm import evaluate_masked_lm

__all__ = ["evaluate_classifier", "evaluate_masked_lm", "predict_logits"]
