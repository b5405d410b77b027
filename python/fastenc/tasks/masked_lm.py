"""Evaluating a masked LM on held-out blocks."""

from collections.abc import Sequence

from fastenc.models import MaskedLM
from fastenc.objectives import MlmCollator, evaluate_objective


def evaluate_masked_lm(
    model: MaskedLM, blocks: Sequence[Sequence[int]], collator: MlmCollator, batch_size: int = 32
) -> dict[str, float]:
    """Mean loss over the masked tokens and perplexity exp(loss), as :func:`fastenc.objectives.evaluate_objective`."""
    return evaluate_objective(model, blocks, collator, batch_size)
