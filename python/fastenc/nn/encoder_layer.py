"""One post-norm transformer encoder layer over packed tokens."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.nn.half_layers import AttentionHalf, FeedForwardHalf
from fastenc.ops import _checks, _dispatch, attention, bias_gelu, layer_norm
from fastenc.ops._matmul import linear
from fastenc.packing import check_cu_seqlens

# name in a configuration: GELU's approximation, or a function
ACTIVATIONS: dict[str, str | Callable[[Tensor], Tensor]] = {
    "gelu": "none",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "relu": torch.relu,
    "silu": F.silu,
}


class LayerWeights(NamedTuple):
    """Weights (out_features, in_features) and biases; q, k, v fused in one tensor or given as three."""

    qkv_weights: tuple[Tensor, ...]
    qkv_biases: tuple[Tensor, ...]
    attention_out_weight: Tensor
    attention_out_bias: Tensor
    attention_norm_weight: Tensor
    attention_norm_bias: Tensor
    up_weight: Tensor
    up_bias: Tensor
    down_weight: Tensor
    down_bias: Tensor
    out_norm_weight: Tensor
    out_norm_bias: Tensor


class LayerOptions(NamedTuple):
    """What a layer needs beside its weights; the dropouts are probabilities, 0 in evaluation."""

    num_heads: int
    activation: str
    eps: float
    attention_dropout_p: float = 0.0
    attention_out_dropout_p: float = 0.0
    down_dropout_p: float = 0.0


def encoder_layer(
    x: Tensor, cu_seqlens: Tensor, max_seqlen: int, weights: LayerWeights, options: LayerOptions
) -> Tensor:
    """Post-norm layer: y = LN(h + FFN(h)), h = LN(x + Attention(x)).

    Where gradients are wanted and every op has a kernel, each half is one node of the autograd graph
    (:mod:`fastenc.nn.half_layers`); otherwise, and under torch.compile, which sees through single ops only, it is
    composed of single ops. Both draw the same dropout masks from the same generator.

    Args:
        x: (total_tokens, hidden_size); cu_seqlens, max_seqlen as in :func:`fastenc.ops.attention`.
    Returns: (total_tokens, hidden_size). Under autocast, in its dtype.
    Source: Vaswani et al. 2017, arXiv:1706.03762; Devlin et al. 2018, arXiv:1810.04805.
    """
    # The linear layers will return autocast's dtype; the residual stream has it from the start.
    x = x.to(_dispatch.autocast_dtype(x.device.type) or x.dtype)
    if torch.compiler.is_compiling():
        # Dynamo makes a tuple's float an input of the graph where it is first used, and fails if that is inside one
        # autograd.Function and a second one uses it again. So it is used here.
        sizes, floats = options[:2], (value + 0.0 for value in options[2:])
        options = LayerOptions(*sizes, *floats)
    h = attention_half(x, cu_seqlens, max_seqlen, weights, options)
    return feed_forward_half(h, weights, options)


def attention_half(
    x: Tensor, cu_seqlens: Tensor, max_seqlen: int, w: LayerWeights, o: LayerOptions
) -> Tensor:
    """LN(x + dropout(Attention(x)))."""
    tensors = (
        *(x, _cat(w.qkv_weights), _cat(w.qkv_biases)),
        *(w.attention_out_weight, w.attention_out_bias),
        *(w.attention_norm_weight, w.attention_norm_bias),
    )
    head_dim = tensors[1].shape[0] // (3 * o.num_heads)
    if _one_node(tensors, head_dim):
        _checks.check_device("encoder_layer", "cu_seqlens", cu_seqlens, x)
        check_cu_seqlens(cu_seqlens, x.shape[0], max_seqlen)
        return AttentionHalf.apply(
            *tensors,
            cu_seqlens,
            max_seqlen,
            o.num_heads,
            _drawn(x, o.attention_dropout_p),
            _drawn(x, o.attention_out_dropout_p),
            o.eps,
        )
    _, qkv_weight, qkv_bias, *_ = tensors
    heads = linear(x, qkv_weight, qkv_bias).view(x.shape[0], 3, o.num_heads, head_dim)
    mixed = attention(heads, cu_seqlens, max_seqlen, dropout_p=o.attention_dropout_p)
    # The bias of a product that a norm follows is added there, in the same pass.
    return layer_norm(
        linear(mixed.flatten(1), w.attention_out_weight),
        w.attention_norm_weight,
        w.attention_norm_bias,
        residual=x,
        x_bias=w.attention_out_bias,
        dropout_p=o.attention_out_dropout_p,
        eps=o.eps,
    )


def feed_forward_half(x: Tensor, w: LayerWeights, o: LayerOptions) -> Tensor:
    """LN(x + dropout(FFN(x)))."""
    tensors = (
        *(x, w.up_weight, w.up_bias, w.down_weight, w.down_bias),
        *(w.out_norm_weight, w.out_norm_bias),
    )
    approximate = ACTIVATIONS[o.activation]
    if isinstance(approximate, str) and _one_node(tensors):
        dropout = _drawn(x, o.down_dropout_p)
        return FeedForwardHalf.apply(*tensors, approximate == "tanh", dropout, o.eps)
    inner = activate(linear(x, w.up_weight), w.up_bias, o.activation)
    return layer_norm(
        linear(inner, w.down_weight),
        w.out_norm_weight,
        w.out_norm_bias,
        residual=x,
        x_bias=w.down_bias,
        dropout_p=o.down_dropout_p,
        eps=o.eps,
    )


def _one_node(tensors: tuple[Tensor, ...], head_dim: int = 16) -> bool:
    """Whether a half of a layer over these tensors, x first, is one node of the autograd graph."""
    x = tensors[0]
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors)
        # Widths that the kernels of every device take.
        and head_dim % 16 == 0
        and head_dim <= 128
        and x.shape[-1] <= 8192
        and _dispatch.choose("attention", "auto", x) != "reference"
    )


def _drawn(x: Tensor, dropout_p: float) -> tuple[Tensor | None, float]:
    """(seed and offset of the mask, probability); None without dropout."""
    _checks.check_dropout("encoder_layer", dropout_p)
    return (_checks.draw_rng_state(x.device) if dropout_p > 0 else None), dropout_p


def activate(x: Tensor, bias: Tensor | None, activation: str, inplace: bool = False) -> Tensor:
    """activation(x + bias) for a name of ACTIVATIONS; in place: x may be overwritten."""
    function = ACTIVATIONS[activation]
    if isinstance(function, str):
        return bias_gelu(x, bias, approximate=function, inplace=inplace)
    return function(x if bias is None else x + bias.to(x.dtype))


def _cat(tensors: tuple[Tensor, ...]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
