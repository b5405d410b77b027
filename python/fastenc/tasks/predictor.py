"""A fine-tuned model and its task, for texts in Python."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fastenc.tasks.registry import task_of_model


class Predictor:
    """Predicts for texts with a fine-tuned model; the folder tells the task.

        predictor = fastenc.predictor("runs/sst2")
        predictor.predict(["a fine film", "a waste of time"])  # [{"sentence": ..., "label": "pos", "p(neg)": ...}, ...]

    Args:
        model: folder of a fine-tuned model, or its name on the hub.
        device: "cpu", "cuda" or a torch device; None: where the model is loaded, the CPU.
        options: of the task, where they are to be others than those of the training.
    """

    def __init__(self, model: str | Path, device: Any = None, **options: Any):
        self.task = task_of_model(model, options)
        self.model = self.task.load(model).eval()
        if device is not None:
            self.model.to(device)

    def predict(self, inputs: Sequence[Any], batch_size: int = 32) -> list[dict[str, Any]]:
        """What ``fastenc predict`` writes to a .jsonl file: a dictionary for each input, in their order.

        Args:
            inputs: texts, or pairs of texts where the model was trained on pairs; for the tasks of words also lists of
                words; for questions dictionaries with "question" and "context".
        Raises: ValueError for an input of another kind.
        """
        if isinstance(inputs, str):
            raise ValueError(
                f"predict takes a list of inputs, got one text: give [{inputs[:40]!r}]"
            )
        if isinstance(inputs, dict) or not isinstance(inputs, Iterable):
            raise ValueError(f"predict takes a list of inputs, got {type(inputs).__name__}")
        data = self.task.data_of(inputs)
        predictions = self.task.predict(self.model, data, batch_size)
        return [
            json.loads(line) for line in self.task.lines(self.model, data, predictions, ".jsonl")
        ]


def predictor(model: str | Path, device: Any = None, **options: Any) -> Predictor:
    """The :class:`Predictor` of a fine-tuned model."""
    return Predictor(model, device, **options)
