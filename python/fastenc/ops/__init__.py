"""The public functions. Each op has one file, which also declares its schemas, its kernels and its cases.

Attention has three: its cases, and what its kernels compute, are apart.
"""

from fastenc.ops import attention_cases  # noqa: F401  (declares the cases)
from fastenc.ops.attention import attention, cross_attention
from fastenc.ops.bias_gelu import bias_gelu
from fastenc.ops.bias_glu import bias_glu
from fastenc.ops.block_sparse_attention import block_sparse_attention
from fastenc.ops.crf import (
    crf_decode,
    crf_decode_nbest,
    crf_log_likelihood,
    crf_marginals,
)
from fastenc.ops.disentangled_attention import disentangled_attention
from fastenc.ops.embedding_layer_norm import embedding_layer_norm, tied_embedding_layer_norm
from fastenc.ops.global_window_attention import global_window_attention
from fastenc.ops.head_statistics import head_statistics
from fastenc.ops.layer_norm import layer_norm, rms_norm
from fastenc.ops.linear_gelu import linear_gelu
from fastenc.ops.linear_kl_divergence import linear_kl_divergence
from fastenc.ops.linear_masked_cross_entropy import linear_masked_cross_entropy
from fastenc.ops.linear_segment_log_sum import linear_segment_log_sum
from fastenc.ops.linear_segment_max import linear_segment_max
from fastenc.ops.masked_cross_entropy import masked_cross_entropy
from fastenc.ops.mlm_corruption import mlm_corruption
from fastenc.ops.packing import pack, unpack
from fastenc.ops.rotary import rotary
from fastenc.ops.segment_pool import segment_pool

__all__ = [
    "attention",
    "bias_gelu",
    "bias_glu",
    "block_sparse_attention",
    "crf_decode",
    "crf_decode_nbest",
    "crf_log_likelihood",
    "crf_marginals",
    "cross_attention",
    "disentangled_attention",
    "embedding_layer_norm",
    "global_window_attention",
    "head_statistics",
    "layer_norm",
    "linear_gelu",
    "linear_kl_divergence",
    "linear_masked_cross_entropy",
    "linear_segment_log_sum",
    "linear_segment_max",
    "masked_cross_entropy",
    "mlm_corruption",
    "pack",
    "rms_norm",
    "rotary",
    "segment_pool",
    "tied_embedding_layer_norm",
    "unpack",
]
