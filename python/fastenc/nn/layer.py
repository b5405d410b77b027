"""One encoder layer in single ops. This defines what all other ways of running a layer must compute."""

import math
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.nn.activation import activate, drop
from fastenc.nn.adaptation import Bottleneck, LayerAdaptation
from fastenc.nn.attend import attend, cross_attend, some_of_qkv
from fastenc.nn.global_attention import attend_globally
from fastenc.nn.layer_call import (
    BLOCK_SPARSE,
    CROSS_ATTENTION,
    DISENTANGLED,
    DROPOUTS,
    GLOBAL_ATTENTION,
    GLOBAL_TOKENS,
    JOINT_HEAD_NORMS,
    KEY_BIAS,
    LAYER_VECTORS,
    OUTPUT_TOKENS,
    OWN_NORMS,
    PLAIN_LAYERS,
    SORTED_QKV,
    VALUE_NORMS,
    LayerCall,
)
from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.layer_inputs import LayerState, rows_of
from fastenc.nn.layer_spec import LayerSpec, NormSpec
from fastenc.nn.layer_vectors import add_gated
from fastenc.nn.layer_weights import LayerWeights, norm_factor, stack_biases
from fastenc.nn.stacked_linear import stacked_linear
from fastenc.ops import dispatch, layer_norm, rms_norm
from fastenc.ops.attention import triton_limit
from fastenc.ops.gemm import linear

# The features of a call that single ops compute.
TAKES = (
    PLAIN_LAYERS
    | SORTED_QKV
    | DROPOUTS
    | DISENTANGLED
    | GLOBAL_ATTENTION
    | GLOBAL_TOKENS
    | JOINT_HEAD_NORMS
    | VALUE_NORMS
    | OWN_NORMS
    | LAYER_VECTORS
    | BLOCK_SPARSE
    | KEY_BIAS
    | OUTPUT_TOKENS
    | CROSS_ATTENTION
    | {"cache", "adaptation"}
)

# The features of TAKES that a GPU computes with the same bits for a text in every batch.
BATCH_INVARIANT = (
    PLAIN_LAYERS
    | SORTED_QKV
    | JOINT_HEAD_NORMS
    | VALUE_NORMS
    | OWN_NORMS
    | LAYER_VECTORS
    | OUTPUT_TOKENS
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
        names = ", ".join(sorted(others))
        return f"with batch_invariant a GPU does not compute {names}: leave out batch_invariant"
    return triton_limit(layer_call.spec.attention.head_dim, x.dtype)


def run_single_ops(layer_call: LayerCall) -> LayerState:
    """One layer of any description, with an adaptation's additions.

        post-norm: h = Norm(x + Attention(x)),      y = Norm(h + FFN(h))
        pre-norm:  s = r + Attention(x), h = Norm(s),  r' = s + FFN(h), y = Norm(r')

    A layer with a source has a third sublayer between the two, of the same form: c = Norm(h + Attention(h, source)).
    With own norms, Attention(x) and FFN(h) are normalised before they are added. A layer with vectors ends with a
    sublayer that these gate (:mod:`fastenc.nn.layer_vectors`), and its norm comes after that one. With output tokens,
    all that follows attention is computed for these tokens only.

    Returns: the next layer's state: x = y, and the residual is y (post-norm) or r' (pre-norm). Under autocast both have
        autocast's dtype.
    Source: Vaswani et al. 2017, arXiv:1706.03762 (post-norm); Xiong et al. 2020, arXiv:2002.04745 (pre-norm).
    """
    spec = layer_call.spec
    dropout = layer_call.dropout
    added = layer_call.adaptation or LayerAdaptation()
    inputs = layer_call.inputs
    weights = layer_call.plain_weights()
    state = in_autocast_dtype(layer_call.state)
    if torch.compiler.is_compiling():
        _use_floats(spec)
        _use_floats(dropout)
    qkv = stacked_linear(state.x, weights.qkv_weights, weights.qkv_biases)
    qkv = spec.attention.split_qkv(added.to_output("qkv", qkv, state.x))
    if inputs.global_tokens is None:
        attended = attend(qkv, inputs, weights, spec.attention, dropout, added)
    else:
        attended = attend_globally(state.x, qkv, inputs, weights, spec.attention, dropout).flatten(
            1
        )
    norm, name = spec.attention_norm, "attention_out"
    if spec.cross_norm is not None:
        h = _end_attention(
            attended, state.residual, weights, norm, spec.pre_norm, dropout, added, name
        )
        attended = cross_attend(h.x, inputs, weights, spec.attention, dropout, added)
        weights, dropout = weights.after_self_attention(), dropout.after_self_attention()
        state, norm, name = h, spec.cross_norm, "cross_out"
    attended = rows_of(attended, inputs.output_tokens)
    residual = rows_of(state.residual, inputs.output_tokens)
    vectors = inputs.layer_vectors
    if vectors is not None:
        vectors = rows_of(vectors, inputs.output_tokens)
    blocks = 1
    plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    if plain and attended.device.type == "cpu":
        blocks = max(1, math.ceil(attended.shape[0] / ROWS_AT_ONCE))
    rest = lambda rows, before, vectors: _feed_forward(
        _end_attention(rows, before, weights, norm, spec.pre_norm, dropout, added, name),
        weights,
        spec,
        dropout,
        added,
        vectors,
    )
    if blocks == 1:
        return rest(attended, residual, vectors)
    of_blocks = (None,) * blocks if vectors is None else vectors.chunk(blocks)
    parts = zip(attended.chunk(blocks), residual.chunk(blocks), of_blocks, strict=True)
    states = [rest(*part) for part in parts]
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
        some_of_qkv(z, w, spec.attention, slice(0, 1)),
        some_of_qkv(x, w, spec.attention, slice(1, 3)),
    )
    attended = attend(
        torch.cat(parts, 1), layer_call.inputs, w, spec.attention, dropout, LayerAdaptation()
    )
    h = _end_attention(
        attended, z, w, spec.attention_norm, False, dropout, LayerAdaptation(), "attention_out"
    )
    return _feed_forward(h, w, spec, dropout, LayerAdaptation(), None).x


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
    vectors: Tensor | None,
) -> LayerState:
    # The bias of the linear layer before the activation is added by the activation's kernel.
    product = stacked_linear(h.x, w.up_weights, (None,) * len(w.up_weights))
    up = added.to_output("up", product, h.x)
    # Without gradients nothing else uses the product, so it may be overwritten.
    up_bias = stack_biases(w.up_biases, w.up_weights)
    inner = activate(up, up_bias, spec.feed_forward, inplace=not torch.is_grad_enabled())
    inner, _ = drop(inner, dropout.inner)
    # A layer with vectors has its last norm after the sublayer that these gate.
    norm = (w.out_norm_weight, w.out_norm_bias) if vectors is None else (None, None)
    state = _end_sublayer(
        added.to_output("down", linear(inner, w.down_weight), inner),
        h.residual,
        (w.down_bias, *norm),
        spec.out_norm,
        spec.pre_norm,
        (dropout.down, dropout.rng_states[2]),
        added.after_feed_forward,
        w.down_own_norm_weight,
    )
    if vectors is None:
        return state
    v = w.layer_vectors
    assert v is not None  # every layer with vectors has these weights
    products = (lambda x: linear(x, v.gate), lambda x: linear(x, v.out))
    return add_gated(state.residual, vectors, w, spec, *products)


def _end_sublayer(
    y: Tensor,
    residual: Tensor,
    affine: tuple[Tensor | None, Tensor | None, Tensor | None],
    norm: NormSpec,
    pre_norm: bool,
    dropout: tuple[float, Tensor | None],
    bottleneck: Bottleneck | None,
    own_norm_weight: Tensor | None,
) -> LayerState:
    """The next sublayer's state: x = Norm(residual + dropout(OwnNorm(y + x_bias))), and its residual.

    Args: affine: the bias of y, and weight and bias of the norm. Without weight, the state is the sum.
    """
    (x_bias, weight, bias), (dropout_p, rng_state) = affine, dropout
    if own_norm_weight is not None:
        y, x_bias = rms_norm(y, own_norm_weight, x_bias=x_bias, eps=norm.eps), None
    if bottleneck is not None:
        biased = y if x_bias is None else y + x_bias.to(y.dtype)
        y = bottleneck(F.dropout(biased, dropout_p)).to(residual.dtype)
        x_bias, dropout_p = None, 0.0
    if weight is None:
        biased = y if x_bias is None else y + x_bias.to(y.dtype)
        total = residual + F.dropout(biased, dropout_p)
        return LayerState(total, total)
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
