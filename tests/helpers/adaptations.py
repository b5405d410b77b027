"""Weights of an adaptation that are not zero, so that an adaptation left out is noticed."""

import torch


def disturb(adapted) -> None:
    """Set values other than those with which training starts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
