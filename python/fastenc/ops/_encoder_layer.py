"""An encoder layer in inference on a CPU, in two ops over blocks of rows that stay in the cache.

Between products, an op of its own would send every intermediate through memory, often through fresh pages.
"""

import torch
from torch import Tensor

from fastenc.ops import _library

_library.define(
    "encoder_layer_attention(Tensor x, Tensor qkv, Tensor qkv_bias, Tensor cu_seqlens, int max_seqlen, int num_heads)"
    " -> Tensor",
    lambda x, qkv, qkv_bias, *_: x.new_empty((x.shape[0], qkv_bias.numel() // 3)),
)
_library.define(
    "encoder_layer_after_attention(Tensor mixed, Tensor x, Tensor attention_out, Tensor attention_out_bias,"
    " Tensor attention_norm_weight, Tensor attention_norm_bias, Tensor up, Tensor up_bias, Tensor down,"
    " Tensor down_bias, Tensor out_norm_weight, Tensor out_norm_bias, bool tanh, float eps) -> Tensor",
    lambda mixed, x, *_: torch.empty_like(x),
)

# Every thread reads all weights for its own rows; of fewer rows, single products share out the weights instead.
ROWS_OF_A_THREAD = 16
# Threads take whole sequences, so the longest must be a small part of what each has to do.
SEQUENCES_OF_A_THREAD = 4


def attention_pays(x: Tensor, max_seqlen: int, width: int, num_heads: int) -> bool:
    """Whether :func:`attention` takes heads of this size, and can share out these sequences."""
    head_dim = width // num_heads
    fits = width == head_dim * num_heads and head_dim % 16 == 0 and head_dim <= 128
    sharing = max_seqlen * SEQUENCES_OF_A_THREAD * torch.get_num_threads() <= x.shape[0]
    return fits and (sharing or torch.get_num_threads() == 1) and _enough(x)


def after_attention_pays(x: Tensor, inner: int) -> bool:
    """Whether :func:`after_attention` takes these widths, and has rows enough."""
    return x.shape[1] % 16 == 0 and inner % 16 == 0 and _enough(x)


def _enough(x: Tensor) -> bool:
    return x.shape[0] >= ROWS_OF_A_THREAD * torch.get_num_threads()


def attention(
    x: Tensor, qkv: tuple[Tensor, Tensor], cu_seqlens: Tensor, max_seqlen: int, num_heads: int
) -> Tensor:
    """Attention(x W_qkv + b_qkv): (total_tokens, width), of every head beside the others.

    Args:
        x: (total_tokens, hidden_size), float32.
        qkv: a weight by :func:`fastenc.ops._matmul.pack_panels`, and its bias (3 width,).
        cu_seqlens, max_seqlen: as in :func:`fastenc.ops.attention`.
    """
    return torch.ops.fastenc.encoder_layer_attention(x, *qkv, cu_seqlens, max_seqlen, num_heads)


def after_attention(
    mixed: Tensor,
    x: Tensor,
    attention_out: tuple[Tensor, Tensor],
    attention_norm: tuple[Tensor, Tensor],
    up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    out_norm: tuple[Tensor, Tensor],
    tanh: bool,
    eps: float,
) -> Tensor:
    """y = LN(h + GELU(h W_up + b_up) W_down + b_down), h = LN(x + mixed W_out + b_out).

    Args:
        mixed: (tokens, width) by :func:`attention`; x: (tokens, hidden_size), the layer's input; both float32.
        attention_out, up, down: a weight by :func:`fastenc.ops._matmul.pack_panels`, and its bias.
        attention_norm, out_norm: weight and bias.
        tanh: GELU's approximation.
    """
    return torch.ops.fastenc.encoder_layer_after_attention(
        mixed, x, *attention_out, *attention_norm, *up, *down, *out_norm, tanh, eps
    )
