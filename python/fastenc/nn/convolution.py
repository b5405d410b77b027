"""A convolution over the tokens of each sequence, which DeBERTa's largest second version adds after its first layer."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc.nn.activation import activate_plain
from fastenc.nn.evaluation_mode import trains
from fastenc.nn.layer_inputs import rows_of
from fastenc.nn.layer_norm import LayerNorm
from fastenc.nn.layer_spec import NormSpec
from fastenc.ops import layer_norm
from fastenc.ops.gemm import linear_in_one_order


@dataclass(frozen=True)
class ConvolutionSpec:
    """A convolution with ``kernel_size`` taps (odd) and ``groups`` of channels.

    ``activation``: one of :func:`fastenc.nn.activation.activate_plain`.
    """

    kernel_size: int
    groups: int
    activation: str
    norm: NormSpec


class ConvolutionWeights(NamedTuple):
    """weight (hidden_size, hidden_size / groups, kernel_size), bias (hidden_size,), the norm's weight and bias.

    ``dropout_p``: the probability of dropout before the activation, 0 in evaluation.
    """

    weight: Tensor
    bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor | None
    dropout_p: float


class Convolution(nn.Module):
    """The weights of :func:`convolve`, under the names of torch's modules."""

    def __init__(self, spec: ConvolutionSpec, width: int, dropout_p: float):
        super().__init__()
        self.conv = nn.Conv1d(width, width, spec.kernel_size, groups=spec.groups)
        self.norm = LayerNorm(width, eps=spec.norm.eps)
        self.dropout_p = dropout_p

    def weights(self) -> ConvolutionWeights:
        conv, norm = self.conv, self.norm
        assert conv.bias is not None  # nn.Conv1d makes it
        dropout_p = self.dropout_p if trains(self) else 0.0
        return ConvolutionWeights(conv.weight, conv.bias, norm.weight, norm.bias, dropout_p)


def convolve(
    x: Tensor,
    cu_seqlens: Tensor,
    spec: ConvolutionSpec,
    weights: ConvolutionWeights,
    residual: Tensor,
    tokens: Tensor | None = None,
) -> Tensor:
    """Norm(residual + act(dropout(conv(x)))): (total_tokens, hidden_size).

    With ``tokens`` only the rows of these are computed, and ``residual`` has only these rows.
    A tap beyond either end of the token's sequence reads 0, so no sequence sees another.
    """
    taps = rows_of(_taps(x, cu_seqlens, spec.kernel_size), tokens)
    inputs, rows = taps.chunk(spec.groups, 2), weights.weight.chunk(spec.groups)
    # One product for each group, over its channels of all taps.
    products = [
        linear_in_one_order(channels.flatten(1), weight.transpose(1, 2).flatten(1))
        for channels, weight in zip(inputs, rows, strict=True)
    ]
    out = F.dropout(torch.cat(products, 1) + weights.bias.to(products[0].dtype), weights.dropout_p)
    out = activate_plain(out, None, spec.activation)
    return layer_norm(
        out.to(residual.dtype),
        weights.norm_weight,
        weights.norm_bias,
        residual=residual,
        eps=spec.norm.eps,
    )


def _taps(x: Tensor, cu_seqlens: Tensor, kernel_size: int) -> Tensor:
    """(total_tokens, kernel_size, width): the rows around each token, 0 outside its sequence."""
    token = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens, token, right=True)
    begin, end = cu_seqlens[sequence - 1], cu_seqlens[sequence.clamp(max=len(cu_seqlens) - 1)]
    row = token[:, None] + torch.arange(kernel_size, device=x.device) - kernel_size // 2
    inside = (row >= begin[:, None]) & (row < end[:, None])
    return F.pad(x, (0, 0, 0, 1))[torch.where(inside, row, x.shape[0])]
