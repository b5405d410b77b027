"""Evaluating a masked LM on held-out blocks."""

from collections.abc import Sequence

from fastenc.models import MaskedLM
from fastenc.objectives import MlmCollator, evaluate_objective


def evaluate_masked_lm(
    model: MaskedLM, blocks: Sequence[Sequence[int]], collator: MlmCollator, batch_size: int = 32
) -> dict[str, float]:
    """{"loss": mean over the masked tokens, "perplexity": exp(loss)}, by :func:`fastenc.objectives.evaluate_objective`.

    Args:
        blocks: token ids of each held-out sequence.
        collator: with another seed than in training.
    """
    return evaluate_objective(model, blocks, collator, batch_size)
