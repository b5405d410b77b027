"""Evaluating a masked LM on held-out blocks."""

import math
from collections.abc import Sequence

import torch

from fastenc.data import BatchSampler
from fastenc.models import MaskedLM
from fastenc.objectives import MlmCollator


@torch.inference_mode()
def evaluate_masked_lm(
    model: MaskedLM, blocks: Sequence[Sequence[int]], collator: MlmCollator, batch_size: int = 32
) -> dict[str, float]:
    """Mean loss over the masked tokens and perplexity exp(loss).

    The masks are those of steps 0, 1, … of the collator's seed: the same at every evaluation, so that losses can be
    compared; use another seed than in training.
    """
    device = next(model.parameters()).device
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    was_training = model.training
    model.eval()
    for step, places in enumerate(
        BatchSampler([1] * len(blocks), batch_size, shuffle=False).epoch(0)
    ):
        example = collator([blocks[place] for place in places], step)
        masked = example["max_labelled"]
        output = model(
            example["batch"].to(device), example["labels"].to(device, non_blocking=True), masked
        )
        total += output.loss * masked
        count += masked
    model.train(was_training)
    loss = total.item() / max(count, 1)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
