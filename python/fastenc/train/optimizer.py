"""AdamW with decay groups, and the learning rate of each step."""

import torch
from torch import nn

from fastenc.train.config import TrainConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: matrices with ``weight_decay``; biases and norm weights (fewer than two dimensions) without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Source: Loshchilov and Hutter 2019, arXiv:1711.05101."""
    groups = parameter_groups(model, config.weight_decay)
    if not any(group["params"] for group in groups):
        raise ValueError("there is nothing to train: every parameter has requires_grad=False")
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.adam_eps, fused=True
    )


def rate_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """Share of the peak learning rate at optimiser step ``step`` (from 0): up linearly, then down to 0."""
    if step < warmup_steps:
        return step / warmup_steps
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))
