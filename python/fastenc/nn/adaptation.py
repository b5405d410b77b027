"""Small trained parts added to a frozen layer, and the layer with them."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc.nn.encoder_layer import LayerOptions, LayerWeights, activate
from fastenc.nn.prepend import prepend_rows
from fastenc.ops import _dispatch, attention, layer_norm
from fastenc.ops._matmul import linear


class LowRank(nn.Module):
    """What LoRA adds to a linear layer's output, some of whose rows belong to parts with a pair of matrices each.

        delta(x)[part] = scale * dropout(x) A[part]^T B[part]^T

    A is drawn as nn.Linear's weight and B is 0, so that training starts from the layer as it is.

    Args:
        rows: output features of each part of the layer, in order ({"query": d, "key": d, "value": d} for q, k, v).
        parts: those that get matrices.
        scale: alpha / rank.
    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    def __init__(
        self,
        in_features: int,
        rows: Mapping[str, int],
        parts: Sequence[str],
        rank: int,
        scale: float,
        dropout_p: float,
    ):
        super().__init__()
        self.rows, self.rank, self.scale, self.dropout_p = dict(rows), rank, scale, dropout_p
        self.a = nn.ParameterDict({part: torch.empty(rank, in_features) for part in parts})
        self.b = nn.ParameterDict({part: torch.zeros(rows[part], rank) for part in parts})
        for matrix in self.a.values():
            nn.init.kaiming_uniform_(matrix, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        inner = linear(F.dropout(x, self.dropout_p, self.training), self._a())
        return linear(inner, self._b()) * self.scale

    def weight(self) -> Tensor:
        """(out_features, in_features): what the layer's weight would gain."""
        return self.scale * self._b() @ self._a()

    def _a(self) -> Tensor:
        return torch.cat([self.a[part] for part in self.rows if part in self.a])

    def _b(self) -> Tensor:
        """The parts' matrices on a diagonal: each part's rows see its own columns alone."""
        some = next(iter(self.b.values()))
        return torch.block_diag(
            *(self.b[p] if p in self.b else some.new_empty(n, 0) for p, n in self.rows.items())
        )


class Bottleneck(nn.Module):
    """x + up(GELU(down(x))); up starts at 0. Source: Houlsby et al. 2019, arXiv:1902.00751."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.down, self.up = nn.Linear(width, size), nn.Linear(size, width)
        nn.init.normal_(self.down.weight, std=0.01)
        for parameter in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.gelu(self.down(x)))


class LayerAdaptation(nn.Module):
    """The parts of one layer; each may be missing.

    Args:
        low_rank: by linear layer, "qkv", "attention_out", "up" or "down".
        after_attention, after_feed_forward: bottlenecks between a sublayer's dropout and its residual sum.
        prefix: length P of learned keys and values (P, 2, hidden_size) that every token also attends to.
    """

    def __init__(
        self,
        low_rank: Mapping[str, LowRank] | None = None,
        after_attention: Bottleneck | None = None,
        after_feed_forward: Bottleneck | None = None,
        prefix: Tensor | None = None,
    ):
        super().__init__()
        self.low_rank = nn.ModuleDict(low_rank or {})
        self.after_attention, self.after_feed_forward = after_attention, after_feed_forward
        self.prefix = None if prefix is None else nn.Parameter(prefix)

    def added(self, name: str, y: Tensor, x: Tensor) -> Tensor:
        """A linear layer's output y for input x, with what is added to it."""
        return y + self.low_rank[name](x).to(y.dtype) if name in self.low_rank else y


def adapted_layer(
    x: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    weights: LayerWeights,
    options: LayerOptions,
    parts: LayerAdaptation,
) -> Tensor:
    """:func:`fastenc.nn.encoder_layer.encoder_layer` with added parts."""
    w, o = weights, options
    x = x.to(_dispatch.autocast_dtype(x.device.type) or x.dtype)
    (qkv_weight,), (qkv_bias,) = w.qkv_weights, w.qkv_biases
    qkv = parts.added("qkv", linear(x, qkv_weight, qkv_bias), x)
    heads = qkv.view(x.shape[0], 3, o.num_heads, -1)
    mixed = _attention(heads, cu_seqlens, max_seqlen, o, parts.prefix).flatten(1)
    projected = parts.added("attention_out", linear(mixed, w.attention_out_weight), mixed)
    h = _residual_norm(
        projected,
        x,
        (w.attention_out_bias, w.attention_norm_weight, w.attention_norm_bias),
        o.attention_out_dropout_p,
        o.eps,
        parts.after_attention,
    )
    inner = activate(parts.added("up", linear(h, w.up_weight), h), w.up_bias, o.activation)
    return _residual_norm(
        parts.added("down", linear(inner, w.down_weight), inner),
        h,
        (w.down_bias, w.out_norm_weight, w.out_norm_bias),
        o.down_dropout_p,
        o.eps,
        parts.after_feed_forward,
    )


def _attention(
    heads: Tensor, cu_seqlens: Tensor, max_seqlen: int, o: LayerOptions, prefix: Tensor | None
) -> Tensor:
    if prefix is None:
        return attention(heads, cu_seqlens, max_seqlen, dropout_p=o.attention_dropout_p)
    # The prefix has no queries: zeros stand for them, and their results are dropped.
    keys_values = prefix.view(prefix.shape[0], 2, *heads.shape[2:])
    rows = F.pad(keys_values, (0, 0, 0, 0, 1, 0))
    heads, cu_seqlens, own = prepend_rows(heads, cu_seqlens, rows)
    longest = max_seqlen + prefix.shape[0]
    return attention(heads, cu_seqlens, longest, dropout_p=o.attention_dropout_p)[own]


def _residual_norm(
    projected: Tensor,
    residual: Tensor,
    affine: tuple[Tensor, Tensor, Tensor],
    dropout_p: float,
    eps: float,
    bottleneck: Bottleneck | None,
) -> Tensor:
    x_bias, weight, bias = affine
    if bottleneck is None:
        return layer_norm(
            projected, weight, bias, residual=residual, x_bias=x_bias, dropout_p=dropout_p, eps=eps
        )
    sublayer = F.dropout(projected + x_bias.to(projected.dtype), dropout_p)
    adapted = bottleneck(sublayer).to(residual.dtype)
    return layer_norm(adapted, weight, bias, residual=residual, eps=eps)
