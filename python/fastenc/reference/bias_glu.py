"""Gated linear units in plain torch. Source: Shazeer 2020, arXiv:2002.05202."""

import torch
from torch import Tensor

from fastenc.reference.activation import ACTIVATIONS


def bias_glu(x: Tensor, bias: Tensor | None = None, *, activation: str = "gelu") -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    u = x.to(wide)
    if bias is not None:
        u = u + bias.to(wide)
    gate, value = u.chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * value).to(x.dtype)
