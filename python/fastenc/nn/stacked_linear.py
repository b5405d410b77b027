"""A linear layer whose weights are stacked."""

from collections.abc import Callable

import torch
from torch import Tensor

from fastenc.nn.layer_weights import stack, stack_biases
from fastenc.ops.gemm import linear


def stacked_linear(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    product: Callable[..., Tensor] = linear,
) -> Tensor:
    """x W^T + b for the stacked weights W and biases b.

    Stacking copies the weights. In inference with few rows it is cheaper to multiply by each weight and concatenate the
    results.

    Args: product: :func:`fastenc.ops.gemm.linear` or a function with its arguments.
    """
    plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    if plain and len(weights) > 1 and x.shape[0] < x.shape[-1] and x.device.type == "cpu":
        return torch.cat([product(x, w, b) for w, b in zip(weights, biases, strict=True)], 1)
    return product(x, stack(weights), stack_biases(biases, weights))
