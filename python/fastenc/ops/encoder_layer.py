"""An encoder layer in inference on a CPU, in two ops over blocks of rows that stay in the cache.

Separate ops would write every intermediate result to memory, often to newly mapped pages. Weights are given packed
(:func:`fastenc.ops.gemm.pack_weight`), or plain, in which case each call packs them. For few rows the threads share
out the columns of each product, and plain weights are read without packing.
"""

import torch

from fastenc.ops import library


def _fake_attention(x, cu_seqlens, longest, relative_bias, rotary, few_rows, qkv, *description):
    _, _, num_heads, _, head_dim, *_ = description
    in_pairs = qkv[0].dtype == torch.bfloat16 and library._C.build_info()["bfloat16_panels"]
    dtype = torch.bfloat16 if in_pairs else torch.float32
    return x.new_empty((x.shape[0], num_heads * head_dim), dtype=dtype)


def fake_layers(
    x, residual, cu_seqlens, longest, biases, rotaries, output_tokens, layers, *arguments
):
    states = [torch.empty_like(x) for _ in range(layers)]
    if output_tokens is not None:
        states[-1] = x.new_empty((output_tokens.shape[0], x.shape[1]))
    return states


def _fake_after_attention(attended, residual, *arguments):
    pre_norm = arguments[-4]
    rows, hidden = residual.shape
    return torch.empty_like(residual), residual.new_empty((rows if pre_norm else 0, hidden))


# attended = Attention(x W_qkv + b_qkv), (total_tokens, num_heads * head_dim). x is float32 or bfloat16. attended is
# bfloat16 where weights of bfloat16 are multiplied in pairs, else float32.
# query_norm, key_norm (head_dim,): the weights of RMSNorm of each query and key before the rotation.
library.define(
    "encoder_layer_attention(Tensor x, Tensor cu_seqlens, int max_seqlen, Tensor? relative_bias, Tensor? rotary,"
    " bool few_rows, Tensor[] qkv, Tensor? qkv_bias, bool packed, int num_heads, int num_key_heads, int head_dim,"
    " float scale, Tensor? query_norm, Tensor? key_norm, float head_norm_eps, int window_left, int window_right)"
    " -> Tensor",
    _fake_attention,
)
# s = residual + attended W_out + b_out, h = Norm(s), y = Norm(r + FFN(h)).
# attention_own_norm, down_own_norm: the weights of norms of the sublayers' outputs before they are added.
# Post-norm: r = h, and the second result is empty. Pre-norm: r = s, and the second result is r + FFN(h), the next
# layer's residual. Both results have the residual's dtype, float32 or bfloat16.
library.define(
    "encoder_layer_after_attention(Tensor attended, Tensor residual, bool few_rows, Tensor[] attention_out,"
    " Tensor? attention_out_bias, Tensor attention_norm_weight, Tensor? attention_norm_bias, Tensor[] up,"
    " Tensor? up_bias, Tensor[] down, Tensor? down_bias, Tensor out_norm_weight, Tensor? out_norm_bias,"
    " Tensor? attention_own_norm, Tensor? down_own_norm, bool packed, int inner, int activation, bool gated,"
    " bool pre_norm, bool rms, float attention_norm_eps, float out_norm_eps) -> (Tensor, Tensor)",
    _fake_after_attention,
)
# Both ops of every layer, one layer after the other, with few_rows. tensors, integers, reals: the arguments after
# few_rows in the two schemas, of all layers in order, divided by type. relative_biases, rotaries: a tensor for each
# layer, or none at all. An empty tensor stands for None. output_tokens: int64 (n,), the rows of which the last layer
# computes what follows its attention; None: all. Returns the residual that each next layer reads, and last the
# normalised output.
LAYERS = (
    "(Tensor x, Tensor residual, Tensor cu_seqlens, int max_seqlen, Tensor[] relative_biases, Tensor[] rotaries,"
    " Tensor? output_tokens, int layers, Tensor[] tensors, int[] integers, float[] reals) -> Tensor[]"
)
library.define(f"encoder_layers{LAYERS}", fake_layers)
