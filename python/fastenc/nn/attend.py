"""Attention of one layer in single ops, from the projection's result to the heads' outputs."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.nn.activation import drop
from fastenc.nn.adaptation import LayerAdaptation
from fastenc.nn.block_plan import plan_of
from fastenc.nn.layer_cache import LayerCache
from fastenc.nn.layer_dropout import NO_DROPOUT, LayerDropout
from fastenc.nn.layer_inputs import AttentionInputs
from fastenc.nn.layer_spec import AttentionSpec
from fastenc.nn.layer_weights import LayerWeights, stack, stack_biases
from fastenc.nn.prepend import prepend_rows
from fastenc.nn.stacked_linear import stacked_linear
from fastenc.ops import (
    attention,
    block_sparse_attention,
    cross_attention,
    disentangled_attention,
    layer_norm,
    rms_norm,
)
from fastenc.ops.gemm import linear, linear_in_one_order


def some_of_qkv(x: Tensor, w: LayerWeights, spec: AttentionSpec, parts: slice) -> Tensor:
    """(tokens, number of parts, num_heads, head_dim), of the three parts q, k and v of the product."""
    bias = stack_biases(w.qkv_biases, w.qkv_weights)
    some = spec.split_qkv(stack(w.qkv_weights).t())[:, parts]
    biases = None if bias is None else spec.split_qkv(bias[None])[0, parts].flatten()
    return linear(x, some.flatten(1).t(), biases).view(x.shape[0], *some.shape[1:])


def attend(
    qkv: Tensor,
    inputs: AttentionInputs,
    w: LayerWeights,
    spec: AttentionSpec,
    dropout: LayerDropout,
    added: LayerAdaptation,
) -> Tensor:
    """Attention of the result of ``spec.split_qkv``: (total_tokens, num_heads * head_dim)."""
    if spec.head_norm_eps is not None:
        qkv = normalise_heads(qkv, w, spec)
    if spec.position_terms:
        assert inputs.relative_positions is not None  # the stack makes them for every such layer
        keys, queries = project_positions(
            inputs.relative_positions.embeddings, w, spec, dropout.positions, added
        )
        return disentangled_attention(
            qkv,
            inputs.cu_seqlens,
            inputs.max_seqlen,
            inputs.relative_positions.slots,
            position_keys=keys,
            position_queries=queries,
            dropout_p=dropout.attention,
            rng_state=dropout.rng_states[0],
            softmax_scale=spec.scale,
        ).flatten(1)
    plan = plan_of(inputs, spec)
    if plan is not None:
        # Without dropout of the weights, as in transformers.
        return block_sparse_attention(
            qkv,
            inputs.cu_seqlens,
            inputs.max_seqlen,
            plan,
            spec.block_size,
            softmax_scale=spec.scale,
        ).flatten(1)
    cu_seqlens, max_seqlen, rows = inputs.cu_seqlens, inputs.max_seqlen, None
    bounds, blocks = inputs.bounds, inputs.blocks
    if added.prefix is not None:
        # The prefix has keys and values only. Its queries are zeros, and their outputs are dropped.
        prefix = added.prefix.view(added.prefix.shape[0], 2, *qkv.shape[2:])
        prefix = F.pad(prefix, (0, 0, 0, 0, 1, 0))
        qkv, cu_seqlens, rows = prepend_rows(qkv, cu_seqlens, prefix)
        max_seqlen, bounds, blocks = max_seqlen + prefix.shape[0], None, None
    if inputs.cache is not None:
        return attend_to_cache(qkv, inputs, inputs.cache, spec).flatten(1)
    attended = attention(
        qkv,
        cu_seqlens,
        max_seqlen,
        dropout_p=dropout.attention,
        rng_state=dropout.rng_states[0],
        bounds=bounds,
        blocks=blocks,
        softmax_scale=spec.scale,
        window_size=spec.window,
        relative_bias=inputs.relative_bias,
        key_bias=inputs.key_bias,
        rotary=inputs.rotary,
        num_key_heads=spec.key_heads or None,
    )
    return (attended if rows is None else attended[rows]).flatten(1)


def normalise_heads(qkv: Tensor, w: LayerWeights, spec: AttentionSpec) -> Tensor:
    """The result of ``spec.split_qkv`` with the norms of queries and keys, and of values if described."""
    eps = spec.head_norm_eps
    assert eps is not None
    if spec.normalises_values:
        return _normalise_values_too(qkv, w, spec, eps)
    q, k, v = spec.parts(qkv)
    return torch.cat([*normalise_queries_and_keys(q, k, w, spec), v], 1).view(qkv.shape)


def normalise_queries_and_keys(
    q: Tensor, k: Tensor, w: LayerWeights, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """The norms of queries and keys, each (total_tokens, heads, head_dim)."""
    eps = spec.head_norm_eps
    assert eps is not None
    if spec.normalises_heads_together:
        norm = lambda x, weight: layer_norm(x.flatten(1), weight, eps=eps).view(x.shape)
    else:
        norm = lambda x, weight: rms_norm(x, weight, eps=eps)
    return norm(q, w.query_norm_weight), norm(k, w.key_norm_weight)


def _normalise_values_too(qkv: Tensor, w: LayerWeights, spec: AttentionSpec, eps: float) -> Tensor:
    """RMSNorm of every head in one pass, times the weights of queries and keys."""
    assert w.query_norm_weight is not None and w.key_norm_weight is not None
    weights = (w.query_norm_weight, w.key_norm_weight, torch.ones_like(w.key_norm_weight))
    factors = torch.cat([f.expand(n, -1) for f, n in zip(weights, spec.heads, strict=True)])
    # Rounded once, after the weights.
    wide = qkv.float() if qkv.dtype.itemsize < 4 else qkv
    heads = rms_norm(wide, eps=eps).view(len(qkv), *factors.shape)
    return (heads * factors).to(qkv.dtype).view(qkv.shape)


def attend_to_cache(
    qkv: Tensor, inputs: AttentionInputs, cache: LayerCache, spec: AttentionSpec
) -> Tensor:
    """Attention of the first tokens of each sequence to each other, or of the next token to all so far, in evaluation.

    Args: qkv: (new tokens, 3, num_heads, head_dim), the same number for each sequence. The keys and values are added to
        the cache.
    Returns: (new tokens, num_heads, head_dim).
    """
    sequences, are_first = inputs.cu_seqlens.shape[0] - 1, not cache.length
    keys, values = cache.append(qkv[:, 1:].unflatten(0, (sequences, -1)))
    if are_first:
        return attention(
            qkv,
            inputs.cu_seqlens,
            inputs.max_seqlen,
            softmax_scale=spec.scale,
            window_size=spec.window,
            relative_bias=inputs.relative_bias,
        )
    # As all sequences are equally long, the op takes their heads for those of one sequence.
    of_one = qkv[:, 0].unflatten(0, (sequences, -1)).transpose(0, 1).flatten(1, 2)
    ends = torch.arange(2, dtype=torch.int32, device=qkv.device)
    bias = inputs.relative_bias
    attended = cross_attention(
        of_one,
        keys,
        values,
        ends * of_one.shape[0],
        ends * cache.length,
        of_one.shape[0],
        cache.length,
        softmax_scale=spec.scale,
        window_size=spec.window,
        relative_bias=None if bias is None else bias.repeat(sequences, 1),
    )
    return attended.unflatten(1, (sequences, -1)).transpose(0, 1).flatten(0, 1)


def project_positions(
    embeddings: Tensor,
    w: LayerWeights,
    spec: AttentionSpec,
    dropout_p: float = 0.0,
    added: LayerAdaptation | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The keys and the queries of relative positions, each (rows, num_heads, head_dim) or None without its term.

        keys = R W_k^T + b_k,  queries = R W_q^T + b_q,  R = dropout(embeddings)

    W_k and W_q are the layer's own position weights, or else those of the content.
    """
    x = drop(embeddings, dropout_p)[0]
    shape = (x.shape[0], spec.num_heads, spec.head_dim)
    wanted = [term in spec.position_terms for term in ("c2p", "p2c")]
    if w.position_key_weight is not None or w.position_query_weight is not None:
        own = (
            (w.position_key_weight, w.position_key_bias),
            (w.position_query_weight, w.position_query_bias),
        )
        keys, queries = (
            None if m is None else linear_in_one_order(x, m, b).view(shape) for m, b in own
        )
        return keys, queries
    if added is not None and "qkv" in added.low_rank:
        qkv = added.to_output("qkv", stacked_linear(x, w.qkv_weights, w.qkv_biases), x)
        queries, keys, _ = qkv.view(x.shape[0], 3, *shape[1:]).unbind(1)
    elif len(w.qkv_weights) == 1:
        rows, bias = 2 * shape[1] * shape[2], w.qkv_biases[0]
        both = linear_in_one_order(
            x, w.qkv_weights[0][:rows], None if bias is None else bias[:rows]
        )
        queries, keys = both.view(x.shape[0], 2, *shape[1:]).unbind(1)
    else:
        queries, keys = (
            linear_in_one_order(x, w.qkv_weights[i], w.qkv_biases[i]).view(shape) for i in range(2)
        )
    return keys if wanted[0] else None, queries if wanted[1] else None


def cross_attend(
    x: Tensor,
    inputs: AttentionInputs,
    weights: LayerWeights,
    spec: AttentionSpec,
    dropout: LayerDropout,
    added: LayerAdaptation,
) -> Tensor:
    w, source = weights.cross, inputs.source
    assert w is not None and source is not None  # the stack gives both to every such layer

    def keys_values() -> Tensor:
        states = source.states.to(x.dtype)
        both = stacked_linear(states, w.key_value_weights, w.key_value_biases)
        return added.to_output("cross_key_value", both, states)

    queries = added.to_output("cross_query", linear(x, w.query_weight, w.query_bias), x)
    return attend_to_source(queries, keys_values, inputs, spec, dropout)


def attend_to_source(
    queries: Tensor,
    keys_values: Callable[[], Tensor],
    inputs: AttentionInputs,
    spec: AttentionSpec,
    dropout: LayerDropout = NO_DROPOUT,
) -> Tensor:
    """Attention of (tokens, width) queries to the source: (tokens, width), with width = num_heads * head_dim.

    Args: keys_values: computes the source's (source_tokens, 2 * width), if the layer's cache does not have them.
    """
    source, cache, heads = inputs.source, inputs.cache, (spec.num_heads, spec.head_dim)
    assert source is not None  # the stack gives it to every such layer
    both = keys_values() if cache is None else cache.of_source(keys_values)
    keys, values = both.view(-1, 2, *heads).unbind(1)
    return cross_attention(
        queries.view(-1, *heads),
        keys,
        values,
        source.cu_targets,
        source.cu_seqlens,
        source.max_targets,
        source.max_seqlen,
        dropout_p=dropout.cross,
        rng_state=dropout.rng_states[3],
        softmax_scale=spec.scale,
    ).flatten(1)
