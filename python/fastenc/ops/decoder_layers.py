"""One more token of each target through all layers of a decoder in inference on a CPU, in one op.

The new tokens are few rows, for which the calls of separate ops take longer than the arithmetic.
"""

import torch

from fastenc.ops import library


def _fake(x, residual, caches, length, sources, cu_seqlens, longest, biases, layers, *arguments):
    return [torch.empty_like(x) for _ in range(layers)]


# Each layer: h = Norm(residual + SelfAttention(x) W_out + b_out), attended = Attention(h W_query + b_query, source),
# and then the op of a layer's rest, with few_rows (fastenc.ops.encoder_layer, fastenc.ops.int8_products). x and
# residual (targets, hidden_size) are float32, one token for each target. Target t attends to source
# t // (targets / sources).
# caches: of each layer (2, room, targets, num_heads, head_dim), keys and values of the ``length`` tokens before; the
# new token's are written behind them. sources: of each layer (source_tokens, 2 * num_heads * head_dim), the source's
# keys and values; cu_seqlens, max_seqlen: its sequences. relative_biases: a tensor for each layer, or none at all. An
# empty tensor stands for None. tensors, integers, reals: of all layers in order, divided by type, first
#     Tensor qkv, Tensor? qkv_bias, Tensor attention_out, Tensor? attention_out_bias, Tensor norm_weight,
#     Tensor? norm_bias, Tensor query, Tensor? query_bias, int num_heads, int head_dim, float scale, bool pre_norm,
#     bool rms, float eps
# with packed weights, and then the arguments of that op. Returns what encoder_layers returns.
_SCHEMA = (
    "(Tensor x, Tensor residual, Tensor(a!)[] caches, int length, Tensor[] sources, Tensor cu_seqlens, int max_seqlen,"
    " Tensor[] relative_biases, int layers, Tensor[] tensors, int[] integers, float[] reals) -> Tensor[]"
)
library.define(f"decoder_layers{_SCHEMA}", _fake)
library.define(f"int8_decoder_layers{_SCHEMA}", _fake)
