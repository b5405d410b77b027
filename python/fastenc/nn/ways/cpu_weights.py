"""What the ops of CPU inference take of a layer: whether they can take its weights, and their arguments from it."""

from collections.abc import Callable

import torch
from torch import Tensor

from fastenc.nn.attend import project_positions
from fastenc.nn.features import given_fields
from fastenc.nn.layer_call import (
    HEAD_NORMS,
    OWN_NORMS,
    FixedArguments,
    Int8Weights,
    PackedCross,
    PackedVectors,
    PackedWeights,
    ProjectedPositions,
    Store,
    unchanged,
)
from fastenc.nn.layer_spec import AttentionSpec, LayerSpec
from fastenc.nn.layer_weights import CrossWeights, LayerWeights, stack_biases
from fastenc.ops import activation, dispatch, gemm, library
from fastenc.ops.attention import WIDEST


def weights_reason(weights: LayerWeights, spec: LayerSpec) -> str | None:
    """Why these ops cannot take the layer's weights, for any input, or None."""
    weight, a = weights.down_weight, spec.attention
    if not library.HAS_CPP:
        return "the compiled extension is not available"
    if weight.device.type != "cpu":
        return f"it runs on CPUs only, the weights are on {weight.device.type}"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 or bfloat16, the weights are {weight.dtype}"
    if not packed_is_faster():
        return "this processor has no AVX2"
    rows, columns = weight.shape
    if rows % 16 or columns % 16 or a.head_dim % 16:
        return (
            "widths must be multiples of 16, they are "
            f"{rows} (hidden), {columns} (inner) and {a.head_dim} (a head)"
        )
    other_attention = a.position_terms or a.block_size or a.global_attention
    widest = dispatch.WIDEST_HEAD if other_attention else WIDEST
    if spec.layer_vector_size % 16:
        return (
            f"layer vectors must have a multiple of 16 numbers, they have {spec.layer_vector_size}"
        )
    if a.head_dim > widest:
        return f"head_dim must be at most {widest}, it is {a.head_dim}"
    if len(spec.norm_types) > 1:
        types = " and ".join(map(repr, sorted(spec.norm_types)))
        return f"its norms must be of one type, they are {types}"
    matrices = (*weights.qkv_weights, weights.attention_out_weight, *weights.up_weights)
    if given_fields(weights):  # few families; every layer of every call asks
        matrices = tuple(tensor for tensor in weights.tensors() if tensor.dim() == 2)
    if any(matrix.dtype != weight.dtype for matrix in matrices):
        return "its weights must have one dtype, they have several"
    return None


def packed_is_faster() -> bool:
    return gemm.has_vectors()


def packing_reason(weights: LayerWeights) -> str | None:
    """Why packing weights that these ops can take would not be faster, or None."""
    ours = gemm.emulates_bfloat16() or gemm.multiplies_pairs()
    if weights.down_weight.dtype == torch.bfloat16 and not ours:
        return "this processor multiplies bfloat16 faster than float32"
    return None


def multiplies_pairs(weights: LayerWeights) -> bool:
    """Whether products are of pairs of bfloat16, with float32 sums."""
    return weights.down_weight.dtype == torch.bfloat16 and gemm.multiplies_pairs()


def pack(weights: LayerWeights, store: Store = unchanged) -> PackedWeights:
    w, v = weights, weights.layer_vectors
    packed = lambda *several: store(gemm.pack_weight(*several))
    return PackedWeights(
        packed(*w.qkv_weights),
        packed(w.attention_out_weight),
        packed(*w.up_weights),
        packed(w.down_weight),
        pack_cross(w.cross, packed),
        None if v is None else PackedVectors(packed(v.gate), packed(v.out)),
    )


def pack_cross(c: CrossWeights | None, packed: Callable[..., Tensor]) -> PackedCross | None:
    """The weights of the sublayer that attends to a source; ``packed`` packs several, stacked."""
    if c is None:
        return None
    return PackedCross(packed(c.query_weight), packed(*c.key_value_weights), packed(c.out_weight))


def project(
    rows: Tensor | None, weights: LayerWeights, spec: LayerSpec
) -> ProjectedPositions | None:
    """The layer's projections of the rows of a table of relative positions; None if it reads none."""
    if rows is None or not spec.attention.position_terms:
        return None
    return ProjectedPositions(*project_positions(rows, weights, spec.attention))


def fixed_arguments(
    w: LayerWeights, packed: PackedWeights | None, spec: LayerSpec
) -> FixedArguments:
    """The arguments of the two ops that follow from the layer alone."""
    return FixedArguments(
        attention_arguments(w, packed, spec.attention), after_attention_arguments(w, packed, spec)
    )


def attention_arguments(
    w: LayerWeights, packed: PackedWeights | None, spec: AttentionSpec
) -> tuple:
    return (
        [*w.qkv_weights] if packed is None else [packed.qkv],
        stack_biases(w.qkv_biases, w.qkv_weights),
        packed is not None,
        *attention_numbers(w, spec),
    )


def after_attention_arguments(
    w: LayerWeights, packed: PackedWeights | None, spec: LayerSpec
) -> tuple:
    out, norm = None if packed is None else packed.attention_out, spec.attention_norm
    if spec.cross_norm is not None:
        out = None if packed is None or packed.cross is None else packed.cross.out
        w, norm = w.after_self_attention(), spec.cross_norm
    f = spec.feed_forward
    return (
        [w.attention_out_weight if out is None else out],
        w.attention_out_bias,
        w.attention_norm_weight,
        w.attention_norm_bias,
        [*w.up_weights] if packed is None else [packed.up],
        stack_biases(w.up_biases, w.up_weights),
        [w.down_weight if packed is None else packed.down],
        w.down_bias,
        w.out_norm_weight,
        w.out_norm_bias,
        w.attention_own_norm_weight,
        w.down_own_norm_weight,
        packed is not None,
        f.intermediate_size,
        activation.NUMBERS[f.activation],
        f.gated,
        spec.pre_norm,
        norm.norm_type == "rms",
        float(norm.eps),
        float(spec.out_norm.eps),
    )


def decoder_arguments(
    w: LayerWeights, packed: PackedWeights | Int8Weights | None, spec: LayerSpec
) -> tuple | None:
    """What :mod:`fastenc.ops.decoder_layers` takes of the layer up to its attention to a source.

    None: the op does not take the layer.
    """
    a, norm = spec.attention, spec.attention_norm
    if packed is None or packed.cross is None or w.cross is None:
        return None
    normalised = (spec.features | given_fields(w)) & (HEAD_NORMS | OWN_NORMS)
    # The op's next token sees all tokens before it.
    if w.down_weight.dtype != torch.float32 or a.window != (-1, 0) or a.key_heads or normalised:
        return None
    return (
        packed.qkv,
        stack_biases(w.qkv_biases, w.qkv_weights),
        packed.attention_out,
        w.attention_out_bias,
        w.attention_norm_weight,
        w.attention_norm_bias,
        packed.cross.query,
        w.cross.query_bias,
        a.num_heads,
        a.head_dim,
        float(a.scale),
        spec.pre_norm,
        norm.norm_type == "rms",
        float(norm.eps),
    )


def attention_numbers(w: LayerWeights, spec: AttentionSpec) -> tuple:
    """Heads, scale, norms of heads and window: what follows the product in the ops of attention."""
    return (
        *spec.heads[:2],
        spec.head_dim,
        float(spec.scale),
        w.query_norm_weight,
        w.key_norm_weight,
        float(spec.head_norm_eps or 0),
        *spec.window,
    )
