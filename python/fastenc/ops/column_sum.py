"""Sums of a matrix's columns in float32: the gradient of a bias, where no other kernel computes it along the way."""

import torch
from torch import Tensor

from fastenc.ops.library import define


def column_sum(x: Tensor) -> Tensor:
    """sum_r x[r, c]; not differentiable.

    Args:
        x: (rows, width), on a device and in a dtype that the kernels take.
    Returns: (width,), float32.
    Numerics: float32 sums for every dtype of x. Their order depends on the shape and the kind of device alone.
    """
    return torch.ops.fastenc.column_sum(x)


define(
    "column_sum(Tensor x) -> Tensor",
    lambda x: x.new_empty((x.shape[1],), dtype=torch.float32),
    triton="column_sum.column_sum",
)
