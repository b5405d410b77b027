"""Attention of layers with global tokens, which have projections of their own (Longformer)."""

from torch import Tensor

from fastenc.nn.layer_spec import (
    NO_DROPOUT,
    AttentionInputs,
    AttentionSpec,
    LayerDropout,
    LayerWeights,
    stack,
    stack_biases,
)
from fastenc.ops import global_window_attention
from fastenc.ops.gemm import linear


def attend_globally(
    x: Tensor,
    qkv: Tensor,
    inputs: AttentionInputs,
    w: LayerWeights,
    spec: AttentionSpec,
    dropout: LayerDropout = NO_DROPOUT,
) -> Tensor:
    """Attention with global tokens, as qkv's queries.

    The queries of the global tokens, and the keys and values that they see, have projections of their own.
    """
    assert inputs.global_tokens is not None and w.global_qkv is not None  # the encoder has both
    rows = spec.num_heads * spec.head_dim
    weight = stack(w.global_qkv.weights)
    bias = stack_biases(w.global_qkv.biases, w.global_qkv.weights)
    part = lambda rows: (weight[rows], None if bias is None else bias[rows])
    queries = linear(x[inputs.global_tokens], *part(slice(rows)))
    keys_and_values = linear(x, *part(slice(rows, None)))
    return global_window_attention(
        qkv,
        queries.view(-1, *qkv.shape[2:]).to(qkv.dtype),
        keys_and_values.view(-1, 2, *qkv.shape[2:]).to(qkv.dtype),
        inputs.cu_seqlens,
        inputs.max_seqlen,
        inputs.global_tokens,
        window_size=spec.window,
        dropout_p=dropout.attention,
        rng_state=dropout.rng_states[0],
        softmax_scale=spec.scale,
    )
