"""One encoder layer in single ops. This defines what all other ways of running a layer must compute."""

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.nn.adaptation import Bottleneck, LayerAdaptation
from fastenc.nn.block_plan import plan_of
from fastenc.nn.global_attention import attend_globally
from fastenc.nn.layer_cache import LayerCache
from fastenc.nn.layer_call import (
    BLOCK_SPARSE,
    CROSS_ATTENTION,
    DISENTANGLED,
    GLOBAL_ATTENTION,
    GLOBAL_TOKENS,
    HEAD_NORMS,
    OWN_NORMS,
    LayerCall,
)
from fastenc.nn.layer_spec import (
    NO_DROPOUT,
    AttentionInputs,
    AttentionSpec,
    FeedForwardSpec,
    LayerDropout,
    LayerSpec,
    LayerState,
    LayerWeights,
    NormSpec,
    norm_factor,
    stack,
    stack_biases,
)
from fastenc.nn.prepend import prepend_rows
from fastenc.ops import (
    attention,
    bias_gelu,
    bias_glu,
    block_sparse_attention,
    cross_attention,
    disentangled_attention,
    dispatch,
    layer_norm,
    rms_norm,
)
from fastenc.ops.attention import triton_limit
from fastenc.ops.gemm import linear, linear_in_one_order

# The features of a call that single ops compute.
TAKES = frozenset(
    {"window", "rotary", "relative_bias", "pre_norm", "norm_type=rms", "gated", "adaptation"}
    | {"interleaved", "key_heads", "rotates_neighbours"}
    | DISENTANGLED
    | GLOBAL_ATTENTION
    | GLOBAL_TOKENS
    | HEAD_NORMS
    | OWN_NORMS
    | BLOCK_SPARSE
    | CROSS_ATTENTION
    | {"cache"}
    | {f"activation={name}" for name in ("gelu_tanh", "silu", "relu")}
    | {f"{name}_dropout" for name in ("attention", "attention_out", "inner", "down", "positions")}
)

# Of these, what a GPU computes with the same bits for a text in every batch.
BATCH_INVARIANT = frozenset(
    {"window", "rotary", "relative_bias", "pre_norm", "norm_type=rms", "gated", "interleaved"}
    | {"key_heads", "rotates_neighbours"}
    | HEAD_NORMS
    | OWN_NORMS
    | {f"activation={name}" for name in ("gelu_tanh", "silu", "relu")}
)

# Inference on a CPU computes the layer after attention in blocks of this many rows, because larger intermediate results
# would be allocated on newly mapped pages in every call.
ROWS_AT_ONCE = 2048


def unsupported_reason(layer_call: LayerCall) -> str | None:
    """Why single ops cannot compute what :func:`fastenc.kernels.batch_invariance.batch_invariance` asks, or None."""
    x = layer_call.state.x
    if not dispatch.is_batch_invariant(x.device.type):
        return None
    if others := layer_call.features() - BATCH_INVARIANT:
        return f"with batch_invariant a GPU does not compute {', '.join(sorted(others))}"
    return triton_limit(layer_call.spec.attention.head_dim, x.dtype)


def run_single_ops(layer_call: LayerCall) -> LayerState:
    """One layer of any description, with an adaptation's additions.

        post-norm: h = Norm(x + Attention(x)),      y = Norm(h + FFN(h))
        pre-norm:  s = r + Attention(x), h = Norm(s),  r' = s + FFN(h), y = Norm(r')

    A layer with a source has a third sublayer between the two, of the same form: c = Norm(h + Attention(h, source)).
    With own norms, Attention(x) and FFN(h) are normalised before they are added.

    Returns: the next layer's state: x = y, and the residual is y (post-norm) or r' (pre-norm). Under autocast both have
        autocast's dtype.
    Source: Vaswani et al. 2017, arXiv:1706.03762 (post-norm); Xiong et al. 2020, arXiv:2002.04745 (pre-norm).
    """
    spec, dropout, added = (
        layer_call.spec,
        layer_call.dropout,
        layer_call.adaptation or LayerAdaptation(),
    )
    inputs = layer_call.inputs
    weights, state = (
        layer_call.prepared.stacked or layer_call.weights,
        in_autocast_dtype(layer_call.state),
    )
    if torch.compiler.is_compiling():
        _use_floats(spec)
        _use_floats(dropout)
    qkv = stacked_linear(state.x, weights.qkv_weights, weights.qkv_biases)
    qkv = spec.attention.split_qkv(added.to_output("qkv", qkv, state.x))
    if inputs.global_tokens is None:
        attended = _attend(qkv, inputs, weights, spec.attention, dropout, added)
    else:
        attended = attend_globally(state.x, qkv, inputs, weights, spec.attention, dropout).flatten(
            1
        )
    norm, name = spec.attention_norm, "attention_out"
    if spec.cross_norm is not None:
        h = _end_attention(
            attended, state.residual, weights, norm, spec.pre_norm, dropout, added, name
        )
        attended = _attend_to_source(h.x, inputs, weights, spec.attention, dropout, added)
        weights, dropout = weights.after_self_attention(), dropout.after_self_attention()
        state, norm, name = h, spec.cross_norm, "cross_out"
    blocks = 1
    plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    if plain and attended.device.type == "cpu":
        blocks = max(1, math.ceil(attended.shape[0] / ROWS_AT_ONCE))
    rest = lambda rows, residual: _feed_forward(
        _end_attention(rows, residual, weights, norm, spec.pre_norm, dropout, added, name),
        weights,
        spec,
        dropout,
        added,
    )
    if blocks == 1:
        return rest(attended, state.residual)
    pairs = zip(attended.chunk(blocks), state.residual.chunk(blocks), strict=True)
    states = [rest(*pair) for pair in pairs]
    x = torch.cat([block.x for block in states])
    return LayerState(x, torch.cat([block.residual for block in states]) if spec.pre_norm else x)


def _use_floats(description: Any) -> None:
    """Use every float of a description once.

    torch.compile makes a float an input of its graph where the float is first used. It fails if that is inside an
    autograd.Function and a second one uses the float again. So all floats are used here, outside of them.
    """
    named = (
        (f.name for f in fields(description)) if is_dataclass(description) else description._fields
    )
    for name in named:
        value = getattr(description, name)
        if isinstance(value, float):
            value + 0.0
        elif is_dataclass(value):
            _use_floats(value)


def in_autocast_dtype(state: LayerState) -> LayerState:
    """The state in autocast's dtype, which the linear layers return, or as it is outside autocast."""
    dtype = dispatch.autocast_dtype(state.x.device.type)
    if dtype is None or state.x.dtype == state.residual.dtype == dtype:
        return state
    x = state.x.to(dtype)
    return LayerState(x, x if state.residual is state.x else state.residual.to(dtype))


def start(x: Tensor, norm: tuple[Tensor, Tensor | None] | None, spec: NormSpec) -> LayerState:
    """The first layer's state for the embeddings' output x: (x, x), or (Norm(x), x) if the stack begins with a norm."""
    if norm is None:
        return LayerState(x, x)
    weight, bias = norm
    return LayerState(normalise(x, norm_factor(weight, spec), bias, spec), x)


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> Tensor:
    if spec.norm_type == "rms":
        return rms_norm(x, weight, eps=spec.eps)
    return layer_norm(x, weight, bias, eps=spec.eps)


def run_with_queries(layer_call: LayerCall, queries: Tensor) -> Tensor:
    """A post-norm layer whose queries z come from other vectors (total_tokens, hidden_size) than its keys and values.

        h = Norm(z + Attention(q(z), k(x), v(x))),  y = Norm(h + FFN(h))

    Returns: y (total_tokens, hidden_size).
    Source: He et al. 2020, arXiv:2006.03654, section 3.2 (enhanced mask decoder).
    """
    w, spec, dropout = layer_call.weights, layer_call.spec, layer_call.dropout
    x, z = in_autocast_dtype(LayerState(layer_call.state.x, queries))
    parts = (
        _some_of_qkv(z, w, spec.attention, slice(0, 1)),
        _some_of_qkv(x, w, spec.attention, slice(1, 3)),
    )
    attended = _attend(
        torch.cat(parts, 1), layer_call.inputs, w, spec.attention, dropout, LayerAdaptation()
    )
    h = _end_attention(
        attended, z, w, spec.attention_norm, False, dropout, LayerAdaptation(), "attention_out"
    )
    return _feed_forward(h, w, spec, dropout, LayerAdaptation()).x


def _some_of_qkv(x: Tensor, w: LayerWeights, spec: AttentionSpec, parts: slice) -> Tensor:
    """(tokens, number of parts, num_heads, head_dim), of the three parts q, k and v of the product."""
    bias = stack_biases(w.qkv_biases, w.qkv_weights)
    some = spec.split_qkv(stack(w.qkv_weights).t())[:, parts]
    biases = None if bias is None else spec.split_qkv(bias[None])[0, parts].flatten()
    return linear(x, some.flatten(1).t(), biases).view(x.shape[0], *some.shape[1:])


def _attend(
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
        queries, keys_values = qkv[:, 0], qkv[:, 1:]
        return attend_to_cache(queries, keys_values, inputs, inputs.cache, spec).flatten(1)
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
        rotary=inputs.rotary,
        num_key_heads=spec.key_heads or None,
    )
    return (attended if rows is None else attended[rows]).flatten(1)


def normalise_heads(qkv: Tensor, w: LayerWeights, spec: AttentionSpec) -> Tensor:
    """The result of ``spec.split_qkv`` with an RMSNorm of each query and each key."""
    assert spec.head_norm_eps is not None
    q, k, v = spec.parts(qkv)
    q = rms_norm(q, w.query_norm_weight, eps=spec.head_norm_eps)
    k = rms_norm(k, w.key_norm_weight, eps=spec.head_norm_eps)
    return torch.cat([q, k, v], 1).view(qkv.shape)


def attend_to_cache(
    queries: Tensor,
    keys_values: Tensor,
    inputs: AttentionInputs,
    cache: LayerCache,
    spec: AttentionSpec,
) -> Tensor:
    """Attention of new tokens to all tokens so far, in evaluation.

    Args: queries: (new tokens, num_heads, head_dim); keys_values: (new tokens, 2, num_heads, head_dim), added to the
        cache. Each sequence has the same number of new tokens.
    Returns: as queries.
    """
    sequences = inputs.cu_seqlens.shape[0] - 1
    keys, values = cache.append(keys_values.unflatten(0, (sequences, -1)))
    # As all sequences are equally long, the op takes their heads for those of one sequence.
    of_one = queries.unflatten(0, (sequences, -1)).transpose(0, 1).flatten(1, 2)
    ends = torch.arange(2, dtype=torch.int32, device=queries.device)
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


def stacked_linear(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    product: Callable[..., Tensor] = linear,
) -> Tensor:
    """x W^T + b for the stacked weights W and biases b.

    Stacking copies the weights. In inference with few rows it is cheaper to multiply by each weight and concatenate the
    results.

    Args: product: :func:`fastenc.ops.gemm.linear` or a function with its arguments.
    """
    few = x.shape[0] < x.shape[-1] and x.device.type == "cpu"
    plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    if len(weights) > 1 and few and plain:
        return torch.cat([product(x, w, b) for w, b in zip(weights, biases, strict=True)], 1)
    return product(x, stack(weights), stack_biases(biases, weights))


def _attend_to_source(
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


def _end_attention(
    attended: Tensor,
    residual: Tensor,
    w: LayerWeights,
    norm: NormSpec,
    pre_norm: bool,
    dropout: LayerDropout,
    added: LayerAdaptation,
    name: str,
) -> LayerState:
    """The end of a sublayer with attention. ``name``: of its output projection in the adaptation."""
    projected = linear(attended, w.attention_out_weight)
    # The bias of a linear layer that a norm follows is added by the norm's kernel.
    return _end_sublayer(
        added.to_output(name, projected, attended),
        residual,
        (w.attention_out_bias, w.attention_norm_weight, w.attention_norm_bias),
        norm,
        pre_norm,
        (dropout.attention_out, dropout.rng_states[1]),
        added.after_attention,
        w.attention_own_norm_weight,
    )


def _feed_forward(
    h: LayerState,
    w: LayerWeights,
    spec: LayerSpec,
    dropout: LayerDropout,
    added: LayerAdaptation,
) -> LayerState:
    # The bias of the linear layer before the activation is added by the activation's kernel.
    product = stacked_linear(h.x, w.up_weights, (None,) * len(w.up_weights))
    up = added.to_output("up", product, h.x)
    # Without gradients nothing else uses the product, so it may be overwritten.
    up_bias = stack_biases(w.up_biases, w.up_weights)
    inner = activate(up, up_bias, spec.feed_forward, inplace=not torch.is_grad_enabled())
    inner, _ = drop(inner, dropout.inner)
    return _end_sublayer(
        added.to_output("down", linear(inner, w.down_weight), inner),
        h.residual,
        (w.down_bias, w.out_norm_weight, w.out_norm_bias),
        spec.out_norm,
        spec.pre_norm,
        (dropout.down, dropout.rng_states[2]),
        added.after_feed_forward,
        w.down_own_norm_weight,
    )


def drop(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """(dropout(x), bool mask of the kept elements, or None if p is 0)."""
    return torch.native_dropout(x, p, True) if p > 0 else (x, None)


def activate(
    x: Tensor, bias: Tensor | None, spec: FeedForwardSpec, inplace: bool = False
) -> Tensor:
    """act(x + bias), or if gated act(a) * b for the halves (a, b) of x + bias. inplace: x may be overwritten."""
    if spec.gated and spec.activation != "relu":
        return bias_glu(x, bias, activation=spec.activation)
    if spec.gated:
        activated, gate = (x if bias is None else x + bias.to(x.dtype)).chunk(2, -1)
        return activated.relu() * gate
    return activate_plain(x, bias, spec.activation, inplace)


def activate_plain(
    x: Tensor, bias: Tensor | None, activation: str, inplace: bool = False
) -> Tensor:
    """act(x + bias) for "gelu", "gelu_tanh", "silu", "relu" or "tanh". inplace: x may be overwritten."""
    if activation in ("gelu", "gelu_tanh"):
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return bias_gelu(x, bias, approximate=approximate, inplace=inplace)
    biased = x if bias is None else x + bias.to(x.dtype)
    if activation == "tanh":
        return torch.tanh(biased)
    return F.silu(biased) if activation == "silu" else F.relu(biased)


def _end_sublayer(
    y: Tensor,
    residual: Tensor,
    affine: tuple[Tensor | None, Tensor, Tensor | None],
    norm: NormSpec,
    pre_norm: bool,
    dropout: tuple[float, Tensor | None],
    bottleneck: Bottleneck | None,
    own_norm_weight: Tensor | None,
) -> LayerState:
    """The next sublayer's state: x = Norm(residual + dropout(OwnNorm(y + x_bias))), and its residual."""
    (x_bias, weight, bias), (dropout_p, rng_state) = affine, dropout
    if own_norm_weight is not None:
        y, x_bias = rms_norm(y, own_norm_weight, x_bias=x_bias, eps=norm.eps), None
    if bottleneck is not None:
        biased = y if x_bias is None else y + x_bias.to(y.dtype)
        y = bottleneck(F.dropout(biased, dropout_p)).to(residual.dtype)
        x_bias, dropout_p = None, 0.0
    function = rms_norm if norm.norm_type == "rms" else partial(layer_norm, bias=bias)
    ended = function(
        y,
        weight,
        residual=residual,
        x_bias=x_bias,
        dropout_p=dropout_p,
        rng_state=rng_state,
        eps=norm.eps,
        return_residual_sum=pre_norm,
    )
    return LayerState(*ended) if pre_norm else LayerState(ended, ended)
