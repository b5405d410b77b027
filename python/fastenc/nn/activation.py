"""Activation and dropout of a feed-forward sublayer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.nn.layer_spec import FeedForwardSpec
from fastenc.ops import bias_gelu, bias_glu


def drop(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """(dropout(x), bool mask of the kept elements, or None if p is 0)."""
    return torch.native_dropout(x, p, True) if p > 0 else (x, None)


def activate(
    x: Tensor, bias: Tensor | None, spec: FeedForwardSpec, inplace: bool = False
) -> Tensor:
    """act(x + bias), or if gated act(a) * b for the halves (a, b) of x + bias. inplace: x may be overwritten."""
    if spec.gated and spec.activation != "relu":
        return bias_glu(x, bias, activation=spec.activation)
    if spec.gated:
        activated, gate = (x if bias is None else x + bias.to(x.dtype)).chunk(2, -1)
        return activated.relu() * gate
    return activate_plain(x, bias, spec.activation, inplace)


def activate_plain(
    x: Tensor, bias: Tensor | None, activation: str, inplace: bool = False
) -> Tensor:
    """act(x + bias) for "gelu", "gelu_tanh", "silu", "relu" or "tanh". inplace: x may be overwritten."""
    if activation in ("gelu", "gelu_tanh"):
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return bias_gelu(x, bias, approximate=approximate, inplace=inplace)
    biased = x if bias is None else x + bias.to(x.dtype)
    if activation == "tanh":
        return torch.tanh(biased)
    return F.silu(biased) if activation == "silu" else F.relu(biased)
