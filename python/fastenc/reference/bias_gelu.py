"""gelu(x + bias) in plain torch. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415."""

import math

import torch
from torch import Tensor


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    u = x.to(wide)
    if bias is not None:
        u = u + bias.to(wide)
    if approximate == "tanh":
        y = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
    else:
        y = 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))
    return y.to(x.dtype)
