"""Attention of layers with global tokens, which have projections of their own (Longformer).

With few global tokens on a CPU, the keys and values that they see are not computed, see
:mod:`fastenc.ops.folded_attention`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.nn.layer_dropout import NO_DROPOUT, LayerDropout
from fastenc.nn.layer_inputs import AttentionInputs
from fastenc.nn.layer_spec import AttentionSpec
from fastenc.nn.layer_weights import GlobalWeights, LayerWeights, stack, stack_biases
from fastenc.ops import checks, cross_attention, dispatch, global_window_attention
from fastenc.ops.folded_attention import folded_attention
from fastenc.ops.gemm import linear_in_one_order
from fastenc.ops.global_window_attention import (
    OP,
    later_state,
    local_attention,
    offsets_of_globals,
)


def attend_globally(
    x: Tensor,
    qkv: Tensor,
    inputs: AttentionInputs,
    w: LayerWeights,
    spec: AttentionSpec,
    dropout: LayerDropout = NO_DROPOUT,
) -> Tensor:
    """Attention with global tokens, as qkv's queries: (total_tokens, num_heads, head_dim).

    The queries of the global tokens, and the keys and values that they see, have projections of their own.
    """
    assert inputs.global_tokens is not None and w.global_qkv is not None  # the encoder has both
    dropout_p = dropout.attention
    rng_state = checks.mask_rng_state(OP, dropout.rng_states[0], dropout_p, x)
    if dispatch.choose(OP, "auto", qkv, **dispatch.head_limits(spec.head_dim)) != "reference":
        of_globals = attend_from_globals(x, inputs, w.global_qkv, spec, dropout_p, rng_state)
        tensors, numbers = local_arguments(inputs, spec, dropout_p, rng_state)
        return local_attention(qkv, of_globals.to(qkv.dtype), *tensors, *numbers)
    queries, keys_and_values = _project(x[inputs.global_tokens], x, w.global_qkv, spec)
    return global_window_attention(
        qkv,
        queries.to(qkv.dtype),
        keys_and_values.to(qkv.dtype),
        inputs.cu_seqlens,
        inputs.max_seqlen,
        inputs.global_tokens,
        window_size=spec.window,
        dropout_p=dropout_p,
        rng_state=rng_state,
        softmax_scale=spec.scale,
    )


def local_arguments(
    inputs: AttentionInputs, spec: AttentionSpec, dropout_p: float, rng_state: Tensor | None
) -> tuple[tuple[Tensor | None, ...], tuple]:
    """The arguments of the local queries' attention after q, k and v: the tensors, and the numbers."""
    assert inputs.global_tokens is not None
    cu_globals = offsets_of_globals(inputs.global_tokens, inputs.cu_seqlens)
    tensors = (inputs.global_tokens, cu_globals, inputs.cu_seqlens, rng_state)
    return tensors, (inputs.max_seqlen, dropout_p, spec.scale, *spec.window)


def attend_from_globals(
    x: Tensor,
    inputs: AttentionInputs,
    w: GlobalWeights,
    spec: AttentionSpec,
    dropout_p: float,
    rng_state: Tensor | None,
) -> Tensor:
    """Attention of the global tokens to all tokens of their sequences: (G, num_heads, head_dim).

    Differentiable: x and the weights.
    """
    assert inputs.global_tokens is not None
    cu_globals = offsets_of_globals(inputs.global_tokens, inputs.cu_seqlens)
    # The masks for keys in the window and for global keys have the first two offsets.
    rng_state = None if rng_state is None else later_state(rng_state, 2)
    projected, cu_seqlens, folded = x, inputs.cu_seqlens, None
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        lengths, counts = cu_seqlens.diff(), cu_globals.diff()
        pairs = zip(lengths.tolist(), counts.tolist(), strict=True)
        # Decided for each sequence alone, so that no result depends on the other sequences.
        folds = torch.tensor([_folding_is_cheaper(*each, x.shape[1], spec) for each in pairs])
        rows = folds.repeat_interleave(counts).nonzero().flatten()
        if len(rows):
            folded = folded_attention(
                x,
                inputs.global_tokens[rows],
                rows,
                lengths.tolist(),
                counts.where(folds, 0).tolist(),
                *_parts(w),
                num_heads=spec.num_heads,
                softmax_scale=spec.scale,
                dropout_p=dropout_p,
                rng_state=rng_state,
            )
        if folded is not None and len(rows) == len(inputs.global_tokens):
            return folded
        # Without keys, the queries of the other sequences get 0 in what follows.
        projected = x[(~folds).repeat_interleave(lengths)]
        cu_seqlens = F.pad(lengths.where(~folds, 0).cumsum(0, dtype=torch.int32), (1, 0))
    queries, keys_and_values = _project(x[inputs.global_tokens], projected, w, spec)
    keys, values = keys_and_values.unbind(1)
    of_globals = cross_attention(
        queries,
        keys,
        values,
        cu_globals,
        cu_seqlens,
        min(inputs.max_seqlen, inputs.global_tokens.shape[0]),
        inputs.max_seqlen,
        softmax_scale=spec.scale,
        dropout_p=dropout_p,
        rng_state=rng_state,
    )
    return of_globals if folded is None else of_globals.index_copy(0, rows, folded)


def _project(
    of_globals: Tensor, x: Tensor, w: GlobalWeights, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """The queries of the global tokens, (G, num_heads, head_dim), and the keys and values of x, (tokens, 2, num_heads,
    head_dim)."""
    (query, *others), (query_bias, *biases) = _parts(w)
    queries = linear_in_one_order(of_globals, query, query_bias)
    keys_and_values = linear_in_one_order(
        x, stack(tuple(others)), stack_biases(tuple(biases), tuple(others))
    )
    heads = (spec.num_heads, spec.head_dim)
    return queries.view(-1, *heads), keys_and_values.view(-1, 2, *heads)


def _parts(w: GlobalWeights) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """The three weights of q, k and v, and their biases."""
    if len(w.weights) == 3:
        return w.weights, w.biases
    (bias,) = w.biases
    return w.weights[0].chunk(3), (None,) * 3 if bias is None else bias.chunk(3)


def _folding_is_cheaper(length: int, count: int, hidden: int, spec: AttentionSpec) -> bool:
    """Whether the keys and values of a sequence cost more FLOPs than ``count`` queries and results as wide as x."""
    width, pairs = spec.num_heads * spec.head_dim, length * count
    projected = length * hidden * width + pairs * width
    return pairs * spec.num_heads * hidden + count * hidden * width < projected
