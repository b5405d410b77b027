"""The evaluations of a run: which was the best, and how many came after it."""

import math
from collections.abc import Mapping
from typing import Any, TypedDict


class Best(TypedDict):
    """The best evaluation of a run: the value of the metric that chooses it, its step and all its metrics."""

    value: float
    step: int
    metrics: dict[str, float]


class Evaluations:
    """Keeps the best evaluation.

    Args:
        metric: the metric that chooses it.
        higher_is_better: whether a larger value of the metric is better.
    """

    def __init__(self, metric: str, higher_is_better: bool):
        self.metric, self.higher_is_better = metric, higher_is_better
        self.best: Best | None = None
        self.since_best = 0

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Record an evaluation. Raises: ValueError if it lacks the metric."""
        if self.metric not in metrics:
            raise ValueError(
                f"metric must be one of the evaluation's {sorted(metrics)}, got {self.metric!r}: give one of them"
            )
        self.since_best += 1
        if self._is_better(metrics[self.metric]):
            self.best = {"value": metrics[self.metric], "step": step, "metrics": metrics}
            self.since_best = 0

    def _is_better(self, value: float) -> bool:
        if self.best is None or math.isnan(self.best["value"]):
            return True
        return value > self.best["value"] if self.higher_is_better else value < self.best["value"]

    def state(self) -> dict[str, object]:
        """What a checkpoint keeps, as JSON values."""
        return {"best": self.best, "evaluations since best": self.since_best}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.best, self.since_best = state["best"], state.get("evaluations since best", 0)
