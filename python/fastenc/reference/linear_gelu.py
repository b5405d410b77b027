"""gelu(x W^T + b) V^T in plain torch. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.reference.activation import gelu


def linear_gelu(x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    inner = gelu(F.linear(x.to(wide), up_weight.to(wide), up_bias.to(wide)))
    return F.linear(inner, down_weight.to(wide)).to(x.dtype)
