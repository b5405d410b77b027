"""Position tables that follow from a formula and are not trained: (positions, width), float32.

Source: Vaswani et al. 2017, arXiv:1706.03762, whose columns alternate. Here the sines come first, then the cosines.
"""

import math

import torch
from torch import Tensor

BASE = 10_000.0
CPU = torch.device("cpu")  # named everywhere, because models are also built on the meta device


def sinusoids(positions: int, width: int) -> Tensor:
    """sin(p / BASE^(2i / width)), then the cosines; an odd width has one sine more."""
    numbers = torch.arange(positions, dtype=torch.float64, device=CPU)
    columns = torch.arange(0, width, 2, dtype=torch.float64, device=CPU)
    angles = numbers[:, None] / BASE ** (columns / width)
    return torch.cat([angles.sin(), angles.cos()[:, : width // 2]], 1).float()


def tensor2tensor_sinusoids(positions: int, width: int, zero_row: int) -> Tensor:
    """sin(p / BASE^(i / (width // 2 - 1))), then the cosines; 0 in ``zero_row`` and in an odd width's last column.

    In float32, as transformers computes it: the angles of late positions are off by up to 1e-4.
    Source: tensor2tensor, Vaswani et al. 2018, arXiv:1803.07416.
    """
    half = width // 2
    numbers = torch.arange(positions, dtype=torch.float32, device=CPU)
    columns = torch.arange(half, dtype=torch.float32, device=CPU)
    angles = numbers[:, None] * (columns * -(math.log(BASE) / (half - 1))).exp()
    table = torch.zeros(positions, width, device=CPU)
    table[:, : 2 * half] = torch.cat([angles.sin(), angles.cos()], 1)
    table[zero_row] = 0.0
    return table
