"""Predicts in Python with a fine-tuned model."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastenc.data.rows import check_whole_characters
from fastenc.tasks.registry import task_of_model


class Predictor:
    """Predicts with a fine-tuned model. The task is read from the model's config.json.

        predictor = fastenc.predictor("runs/sst2")
        predictor.predict(["a fine film", "a waste of time"])  # [{"sentence": ..., "label": "pos", "p(neg)": ...}, ...]

    Args:
        model: folder of a fine-tuned model, or its name on the hub.
        device: "cpu", "cuda" or a torch device; None: the CPU.
        options: options of the task that differ from those of the training.
    Raises: ValueError for a model without a task's head, and for an option that the task does not have.
    """

    def __init__(
        self, model: str | Path, device: torch.device | str | None = None, **options: object
    ):
        self.task = task_of_model(model, options)
        self.model = self.task.load(model).eval()
        if device is not None:
            self.model.to(device)

    def predict(self, inputs: Sequence[object], batch_size: int = 32) -> list[dict[str, Any]]:
        """Predict for a list of inputs.

        Args:
            inputs: texts; pairs of texts for a model that was trained on pairs. Tasks that tag words or find entities
                also take lists of words. Question answering takes dictionaries with "question" and "context", and
                reranking (query, document) or (query, list of documents).
            batch_size: number of examples that the model takes at a time.
        Returns: a dictionary for each input, as ``fastenc predict`` writes it to a .jsonl file.
        Raises: ValueError for an input of a wrong type, or with half of a character.
        """
        if isinstance(inputs, str):
            raise ValueError(f"inputs must be a list, got a single text: give [{inputs[:40]!r}]")
        if isinstance(inputs, dict) or not isinstance(inputs, Iterable):
            raise ValueError(
                f"inputs must be a list, got {type(inputs).__name__}: give a list of inputs"
            )
        inputs = list(inputs)
        data = self.task.data_of(inputs)
        for index, each in enumerate(inputs):
            check_whole_characters(each, f"input {index}")
        predictions = self.task.predict(self.model, data, batch_size)
        return [
            json.loads(line) for line in self.task.lines(self.model, data, predictions, ".jsonl")
        ]


def predictor(
    model: str | Path, device: torch.device | str | None = None, **options: object
) -> Predictor:
    """Load a fine-tuned model to predict in Python. The task is read from the model's config.json.

        fastenc.predictor("runs/sst2").predict(["a fine film"])  # [{"sentence": ..., "label": "pos", "p(neg)": ...}]

    Args:
        model: folder of a fine-tuned model, or its name on the hub.
        device: "cpu", "cuda" or a torch device; None: the CPU.
        options: options of the task that differ from those of the training.
    Returns: a :class:`Predictor`, whose ``predict`` takes a list of inputs.
    Raises: ValueError for a model without a task's head, and for an option that the task does not have.
    """
    return Predictor(model, device, **options)
