"""Attention of CPU inference in separate ops, for layers and inputs that the one op of attention does not take."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastenc.nn.attend import attend_to_cache, attend_to_source, normalise_heads, project_positions
from fastenc.nn.block_plan import plan_of
from fastenc.nn.global_attention import attend_globally
from fastenc.nn.layer_call import LayerCall, PackedWeights
from fastenc.nn.layer_inputs import AttentionInputs
from fastenc.nn.layer_spec import AttentionSpec, LayerSpec
from fastenc.nn.layer_weights import LayerWeights, stack, stack_biases
from fastenc.nn.stacked_linear import stacked_linear
from fastenc.nn.ways.cpu_weights import multiplies_pairs
from fastenc.ops import (
    attention,
    block_sparse_attention,
    disentangled_attention,
    gemm,
    layer_norm,
    rms_norm,
)


def attends_separately(inputs: AttentionInputs, a: AttentionSpec, rounds_otherwise: bool) -> bool:
    """Whether the layer's attention is an op of its own, after the product with q, k and v.

    Args:
        rounds_otherwise: whether attention in that op rounds otherwise. Then a layer that needs another op for some
            batches takes it for all, so that a sequence's result does not depend on its batch.
    """
    needed_for_some = a.global_attention or bool(a.block_size)
    return (
        bool(a.position_terms)
        or a.sorts_qkv
        or a.normalises_values
        or a.normalises_heads_together
        or inputs.cache is not None
        or inputs.key_bias is not None
        or inputs.global_tokens is not None
        or plan_of(inputs, a) is not None
        or (rounds_otherwise and needed_for_some)
    )


def attend(qkv: Tensor, layer_call: LayerCall) -> Tensor:
    """Attention of the product with q, k and v: float32 (total_tokens, num_heads * head_dim)."""
    inputs, a = layer_call.inputs, layer_call.spec.attention
    if a.position_terms:
        attended = _attend_disentangled(qkv, layer_call)
    elif inputs.global_tokens is not None:
        weights = layer_call.plain_weights()
        attended = attend_globally(layer_call.state.x, a.split_qkv(qkv), inputs, weights, a)
    elif inputs.cache is not None:
        attended = attend_to_cache(a.split_qkv(qkv), inputs, inputs.cache, a)
    elif (plan := plan_of(inputs, a)) is not None:
        attended = block_sparse_attention(
            a.split_qkv(qkv),
            inputs.cu_seqlens,
            inputs.max_seqlen,
            plan,
            a.block_size,
            softmax_scale=a.scale,
        )
    else:
        heads = a.split_qkv(qkv)
        if a.head_norm_eps is not None:
            heads = normalise_heads(heads, layer_call.plain_weights(), a)
        attended = attention(
            heads,
            inputs.cu_seqlens,
            inputs.max_seqlen,
            softmax_scale=a.scale,
            window_size=a.window,
            relative_bias=inputs.relative_bias,
            key_bias=inputs.key_bias,
            rotary=inputs.rotary,
            num_key_heads=a.key_heads or None,
        )
    return attended.flatten(1).float()


def _attend_disentangled(qkv: Tensor, layer_call: LayerCall) -> Tensor:
    inputs, a = layer_call.inputs, layer_call.spec.attention
    assert inputs.relative_positions is not None  # the stack makes them for every such layer
    embeddings, slots, first = inputs.relative_positions
    tables: tuple[Tensor | None, ...]
    if (projected := layer_call.prepared.positions) is not None:
        rows = slice(first, first + embeddings.shape[0])
        tables = tuple(None if table is None else table[rows] for table in projected)
    else:
        tables = project_positions(embeddings, layer_call.plain_weights(), a)
    keys, queries = (None if table is None else table.to(qkv.dtype) for table in tables)
    return disentangled_attention(
        a.split_qkv(qkv),
        inputs.cu_seqlens,
        inputs.max_seqlen,
        slots,
        position_keys=keys,
        position_queries=queries,
        softmax_scale=a.scale,
    )


class CrossProducts(NamedTuple):
    """The products up to cross-attention, each of rows. Without the bias of ``attention_out``, which the norm's kernel
    adds."""

    attention_out: Callable[[Tensor], Tensor]
    query: Callable[[Tensor], Tensor]
    key_value: Callable[[Tensor], Tensor]


def cross_products(w: LayerWeights, packed: PackedWeights | None) -> CrossProducts:
    c, packed_cross = w.cross, None if packed is None else packed.cross
    assert c is not None  # only layers that attend to a source ask
    query, key_value = (None, None) if packed_cross is None else packed_cross[:2]
    return CrossProducts(
        lambda x: product(
            x, (w.attention_out_weight,), (None,), None if packed is None else packed.attention_out
        ),
        lambda x: product(x, (c.query_weight,), (c.query_bias,), query),
        lambda states: product(states, c.key_value_weights, c.key_value_biases, key_value),
    )


def run_cross_attention(
    attended: Tensor, layer_call: LayerCall, products: CrossProducts
) -> tuple[Tensor, Tensor]:
    """The end of self-attention, and cross-attention without the end of its sublayer.

    Returns: (total_tokens, num_heads * head_dim), and the residual for that end.
    """
    state, inputs, spec = layer_call.state, layer_call.inputs, layer_call.spec
    w, source = layer_call.plain_weights(), inputs.source
    assert source is not None  # the stack gives it to every such layer
    y = products.attention_out(attended)
    rms = spec.attention_norm.norm_type == "rms"
    norm = rms_norm if rms else partial(layer_norm, bias=w.attention_norm_bias)
    h = norm(
        y.to(state.residual.dtype),
        w.attention_norm_weight,
        residual=state.residual,
        x_bias=w.attention_out_bias,
        eps=spec.attention_norm.eps,
        return_residual_sum=spec.pre_norm,
    )
    x, before = h if spec.pre_norm else (h, h)
    keys_values = lambda: products.key_value(source.states)
    attended = attend_to_source(products.query(x), keys_values, inputs, spec.attention)
    return attended.float(), before


def project_qkv(
    x: Tensor, w: LayerWeights, spec: LayerSpec, packed: PackedWeights | None
) -> Tensor:
    """The product with q, k and v."""
    plain = packed is None and spec.attention.position_terms and x.dtype == w.qkv_weights[0].dtype
    if plain and (not multiplies_pairs(w) or x.shape[0] <= gemm.FEW_ROWS):
        return stacked_linear(x, w.qkv_weights, w.qkv_biases, gemm.linear_in_one_order)
    return product(x, w.qkv_weights, w.qkv_biases, None if packed is None else packed.qkv)


def product(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    packed: Tensor | None,
) -> Tensor:
    """x W^T + b for stacked weights and biases.

    Returns: the weights' dtype; float32 if the weights are packed and not multiplied in pairs of bfloat16.
    """
    bias, dtype = stack_biases(biases, weights), weights[0].dtype
    pairs = dtype == torch.bfloat16 and gemm.multiplies_pairs()
    if pairs:
        x = x.to(dtype)
    if packed is None:
        return torch.ops.fastenc.gemm(x, stack(weights).t(), bias)
    rows = sum(weight.shape[0] for weight in weights)
    x = x if x.dtype == packed.dtype else x.float()
    y = gemm.gemm_packed(x, packed, None if bias is None else bias.float(), rows)
    return y.to(dtype) if pairs else y
