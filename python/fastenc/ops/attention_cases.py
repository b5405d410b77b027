"""The cases of attention: random inputs, and the result in PyTorch's own attention."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops.attention import attention, cross_attention
from fastenc.ops.attention_kernels import split_qkv
from fastenc.ops.cases import (
    Draw,
    Size,
    declare_case,
    masked_scores,
    rotary_table,
    rotated,
    sequences,
)


def _biases(size: Size, keys: int, draw: Draw) -> dict[str, Any]:
    if not draw.choice(False, True):
        return {}
    table = draw.parameter(size.heads, 2 * draw.choice(32, 0, 1, 9) + 1)
    return {
        "window_size": draw.choice((-1, -1), (2, 3), (0, 0), (-1, 4)),
        "alibi_slopes": draw.choice(None, draw.float32(size.heads).abs()),
        "relative_bias": draw.choice(None, table),
        "key_bias": draw.choice(None, draw.float32(keys)),
    }


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    return {
        "qkv": draw.normal(size.tokens, 3, size.heads, size.head_dim),
        "cu_seqlens": draw.offsets(size.lengths),
        "max_seqlen": size.longest,
        "dropout_p": draw.choice(0.0, 0.0, 0.2),
        "softmax_scale": draw.choice(None, 0.3),
        **_biases(size, size.tokens, draw),
    }


def _grouped_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    divisors = [n for n in range(1, size.heads) if size.heads % n == 0]
    key_heads = draw.choice(*(divisors or [1]))
    heads = size.heads + 2 * key_heads
    return {"qkv": draw.normal(size.tokens, heads, size.head_dim), "num_key_heads": key_heads}


def _cross_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    """A sequence may have more or fewer keys than queries, or none."""
    keys = [draw.choice(n or 3, 0, 1, 2 * n + 1) for n in reversed(size.lengths)]
    of_keys = (sum(keys), draw.choice(size.heads, 1))
    shapes = {"q": (size.tokens, size.heads), "k": of_keys, "v": of_keys}
    return {
        **{name: draw.normal(*shape, size.head_dim) for name, shape in shapes.items()},
        "cu_seqlens_q": draw.offsets(size.lengths),
        "cu_seqlens_k": draw.offsets(keys),
        "max_seqlen_q": size.longest,
        "max_seqlen_k": max(size.longest, *keys, 0),
        "dropout_p": draw.choice(0.0, 0.0, 0.2),
        **_biases(size, sum(keys), draw),
    }


def _plain_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, key_bias=None, **biases: Any) -> Tensor:
    """PyTorch's attention, a sequence at a time, with explicit masks."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    biased = key_bias is not None or bool(biases)
    hidden = k.new_zeros(len(k)) if key_bias is None else key_bias
    parts = ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k), (hidden, cu_seqlens_k))
    outputs = []
    for *rows, bias in zip(*(sequences(*part) for part in parts), strict=True):
        sizes = len(rows[0]), len(rows[1])
        mask = masked_scores(*sizes, q, **biases, key_bias=bias) if biased else None
        one = [x.transpose(0, 1)[None] for x in rows]
        out = F.scaled_dot_product_attention(one[0], one[1], one[2], mask)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _plain(
    qkv, cu_seqlens, max_seqlen, dropout_p, softmax_scale, rotary=None, num_key_heads=None, **biases
) -> Tensor:
    q, k, v = split_qkv((qkv,), num_key_heads)
    if rotary is not None:
        q, k = (rotated(x, rotary, cu_seqlens) for x in (q, k))
    return _plain_attention(q, k, v, cu_seqlens, cu_seqlens, **biases)


def _plain_cross(max_seqlen_q, max_seqlen_k, dropout_p, **inputs: Any) -> Tensor:
    return _plain_attention(**inputs)


def _attention_case(detail: str, more: Callable[[Size, Draw], dict[str, Any]]) -> None:
    """A case of sequences too long for the kernel of short ones."""
    inputs = lambda size, draw: {**_case_inputs(size, draw), **more(size, draw)}
    declare_case(attention, inputs, _plain, detail, resize=lambda size: size.at_least(130))


declare_case(attention, _case_inputs, _plain)
_attention_case("long", lambda size, draw: {})
_attention_case("window", lambda size, draw: {"window_size": (64, 32)})
_attention_case(
    "relative bias", lambda size, draw: {"relative_bias": draw.parameter(size.heads, 65)}
)
_attention_case(
    "ALiBi and key bias",
    lambda size, draw: {
        "alibi_slopes": draw.keep(2.0 ** -torch.arange(1, size.heads + 1)),
        "key_bias": draw.float32(size.tokens),
    },
)
_attention_case(
    "rotary",
    lambda size, draw: {"rotary": draw.keep(rotary_table(size.longest, size.head_dim))},
)


_attention_case("grouped queries", _grouped_inputs)
declare_case(cross_attention, _cross_inputs, _plain_cross)
