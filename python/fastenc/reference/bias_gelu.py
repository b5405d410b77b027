"""gelu(x + bias) in plain torch. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415."""

import torch
from torch import Tensor

from fastenc.reference.activation import gelu, gelu_tanh


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    u = x.to(wide)
    if bias is not None:
        u = u + bias.to(wide)
    return (gelu_tanh(u) if approximate == "tanh" else gelu(u)).to(x.dtype)
