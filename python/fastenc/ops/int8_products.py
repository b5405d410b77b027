"""Products of operands in 8 bits on a CPU, and a layer in two ops whose four products are such.

:mod:`fastenc.reference.int8_linear` has the formula. The ops are not differentiable. They need AVX2,
and on a processor with AVX-512 also AVX512-VNNI. AVX-VNNI and AMX are used where they are. The integers and the float32
arithmetic on them are the same on each.
"""

import torch
from torch import Tensor

from fastenc.ops import library
from fastenc.ops.encoder_layer import LAYERS, fake_layers
from fastenc.reference.int8_linear import group_size


def has_int8_products() -> bool:
    """Whether the instruction set in use multiplies 8 bits."""
    return library.HAS_CPP and library._C.build_info()["int8_products"] is not None


def attends_in_bfloat16() -> bool:
    """Whether a layer in 8 bits multiplies bfloat16 in its attention, by AMX or AVX512-BF16.

    On Intel's processors AVX512-BF16 is no faster than float32.
    """
    built = library._C.build_info()
    return built["bfloat16_tiles"] or (built["bfloat16_panels"] and not built["intel_processor"])


def pack_int8(*weights: Tensor) -> Tensor:
    """Weights (out_features, in_features), stacked along the first dimension, in 8 bits.

    Args: weights: finite float32; both widths are multiples of 16.
    Returns: int8 (panels, bytes of a panel), in the order in which our kernels read. The size of a panel depends on the
        instruction set.
    """
    return torch.ops.fastenc.pack_int8(list(weights))


def int8_linear(x: Tensor, packed: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """x W^T + bias for float32 x (rows, inner) and packed = pack_int8(W), W (columns, inner).

    Returns: float32 (rows, columns).
    """
    return torch.ops.fastenc.int8_linear(x, packed, bias, columns)


def _fake_packed(weights: list[Tensor]) -> Tensor:
    width = library._C.build_info()["panel_columns"]
    columns, depth = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    size = group_size(depth)
    groups = -(-depth // size)
    shape = (-(-columns // width), width * (4 * (1 + groups) + groups * size))
    return weights[0].new_empty(shape, dtype=torch.int8)


def _fake_quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = -(-x.shape[1] // group_size(x.shape[1]))
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty((x.shape[0], groups, 2))


def _fake_attention(x, cu_seqlens, longest, relative_bias, rotary, qkv, bias, heads, *description):
    _, head_dim, *_ = description
    return x.new_empty((x.shape[0], heads * head_dim))


def _fake_after_attention(attended, residual, *arguments):
    pre_norm = arguments[-4]
    rows, hidden = residual.shape
    return torch.empty_like(residual), residual.new_empty((rows if pre_norm else 0, hidden))


library.define("pack_int8(Tensor[] weights) -> Tensor", _fake_packed)
library.define("quantise_int8(Tensor x) -> (Tensor, Tensor)", _fake_quantised)
library.define(
    "int8_linear(Tensor x, Tensor packed, Tensor? bias, int columns) -> Tensor",
    lambda x, packed, bias, columns: x.new_empty((x.shape[0], columns)),
)
# As encoder_layer_attention and encoder_layer_after_attention (fastenc.ops.encoder_layer) of float32 rows; the weights
# are those of pack_int8. A gated layer's two halves of up are up and gate; up_bias is that of both. bf16:
# attention multiplies bfloat16.
library.define(
    "int8_layer_attention(Tensor x, Tensor cu_seqlens, int max_seqlen, Tensor? relative_bias, Tensor? rotary,"
    " Tensor qkv, Tensor? qkv_bias, int num_heads, int num_key_heads, int head_dim, float scale, Tensor? query_norm,"
    " Tensor? key_norm, float head_norm_eps, int window_left, int window_right, bool bf16) -> Tensor",
    _fake_attention,
)
library.define(
    "int8_layer_after_attention(Tensor attended, Tensor residual, Tensor attention_out, Tensor? attention_out_bias,"
    " Tensor attention_norm_weight, Tensor? attention_norm_bias, Tensor up, Tensor? gate, Tensor? up_bias, Tensor down,"
    " Tensor? down_bias, Tensor out_norm_weight, Tensor? out_norm_bias, Tensor? attention_own_norm,"
    " Tensor? down_own_norm, int inner, int activation, bool pre_norm, bool rms, float attention_norm_eps,"
    " float out_norm_eps) -> (Tensor, Tensor)",
    _fake_after_attention,
)
library.define(f"int8_layers{LAYERS}", fake_layers)
