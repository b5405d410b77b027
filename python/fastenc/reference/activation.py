"""The activations that ops fuse, in plain torch."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu(u: Tensor) -> Tensor:
    return 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))


def gelu_tanh(u: Tensor) -> Tensor:
    # Beyond the bounds tanh is -1 or 1. Without them, the slope of an infinite cube would be 0 * infinity.
    bounded = u.clamp(-100, 100)
    return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (bounded + 0.044715 * bounded**3)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
}
