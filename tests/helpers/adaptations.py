"""Weights of an adaptation that no test may find at zero."""

import torch


def disturb(adapted) -> None:
    """Values away from those that training starts with."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
