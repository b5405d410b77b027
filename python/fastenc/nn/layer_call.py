"""One call of a layer: all that a way of running it reads."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fastenc.nn.adaptation import LayerAdaptation
from fastenc.nn.features import given_fields
from fastenc.nn.layer_dropout import NO_DROPOUT, LayerDropout
from fastenc.nn.layer_inputs import AttentionInputs, LayerState
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.layer_weights import CastWeights, LayerWeights

# Tables made from the sequences' lengths. They spare a kernel work and change no result.
DERIVED_INPUTS = frozenset({"bounds", "blocks"})
# The features of layers of self-attention and a feed-forward sublayer that all ways compute.
PLAIN_LAYERS = frozenset(
    {"window", "rotary", "relative_bias", "pre_norm", "norm_type=rms", "gated", "key_heads"}
    | {f"activation={name}" for name in ("gelu_tanh", "silu", "relu")}
)
# The features of a product that has q, k and v in another order than the kernels read them.
SORTED_QKV = frozenset({"interleaved", "rotates_neighbours"})
# The features of dropout in the sublayers that every layer has, and of relative positions.
DROPOUTS = frozenset(
    f"{name}_dropout" for name in ("attention", "attention_out", "inner", "down", "positions")
)
# The features of disentangled attention (fastenc.nn.attend.project_positions).
DISENTANGLED = frozenset(
    {"position_terms", "relative_positions", "position_key_weight", "position_key_bias"}
    | {"position_query_weight", "position_query_bias"}
)
# The features of global tokens (fastenc.nn.global_attention). Without any in the batch, a layer has a window.
GLOBAL_ATTENTION = frozenset({"global_attention", "global_qkv"})
GLOBAL_TOKENS = frozenset({"global_tokens"})
# The features of norms of queries and keys, and of norms of the sublayers' outputs.
HEAD_NORMS = frozenset({"head_norm_eps", "query_norm_weight", "key_norm_weight"})
JOINT_HEAD_NORMS = HEAD_NORMS | {"normalises_heads_together"}
OWN_NORMS = frozenset({"own_norms", "attention_own_norm_weight", "down_own_norm_weight"})
# The features of a third sublayer, which vectors of the layer gate, and of RMSNorm of values.
LAYER_VECTORS = frozenset({"layer_vector_size", "layer_vectors"})
VALUE_NORMS = frozenset({"normalises_values"})
# The features of block-sparse attention (fastenc.nn.block_plan).
BLOCK_SPARSE = frozenset({"block_size", "random_blocks", "block_plan"})
# The feature of keys that nobody sees, such as padding.
KEY_BIAS = frozenset({"key_bias"})
# The feature of a last layer whose output is needed for some tokens only.
OUTPUT_TOKENS = frozenset({"output_tokens"})

# The features of a sublayer that attends to a source (fastenc.nn.attend.cross_attend).
CROSS_ATTENTION = frozenset({"cross_norm", "cross", "source", "cross_dropout", "cross_out_dropout"})


# Stores a packed weight, and returns it as it is stored.
Store = Callable[[Tensor], Tensor]


def unchanged(packed: Tensor) -> Tensor:
    """Stores the weight nowhere else."""
    return packed


class PackedCross(NamedTuple):
    """As :class:`PackedWeights`, of the sublayer that attends to a source."""

    query: Tensor
    key_value: Tensor
    out: Tensor


class PackedVectors(NamedTuple):
    """As :class:`PackedWeights`, of the sublayer that a layer's vectors gate."""

    gate: Tensor
    out: Tensor


class PackedWeights(NamedTuple):
    """A layer's weights, each packed by :func:`fastenc.ops.gemm.pack_weight`."""

    qkv: Tensor
    attention_out: Tensor
    up: Tensor
    down: Tensor
    cross: PackedCross | None = None
    vectors: PackedVectors | None = None


class Int8Weights(NamedTuple):
    """A layer's weights, each packed by :func:`fastenc.ops.int8_products.pack_int8`.

    Fields:
        gate: of a gated ``up`` the half that is not activated, or None.
        bf16_attention: whether attention multiplies bfloat16.
        cross: of the sublayer that attends to a source, or None.
        vectors: of the sublayer that a layer's vectors gate, or None.
    """

    qkv: Tensor
    attention_out: Tensor
    up: Tensor
    gate: Tensor | None
    down: Tensor
    bf16_attention: bool
    cross: PackedCross | None = None
    vectors: PackedVectors | None = None


class FixedArguments(NamedTuple):
    """The last arguments of a layer's two CPU ops, which no call changes: weights, biases, numbers.

    They are those of :mod:`fastenc.ops.int8_products` if the layer has weights in 8 bits, else of
    :mod:`fastenc.ops.encoder_layer`.

    Fields:
        decoder: the first arguments that the op of a decoder's next tokens (:mod:`fastenc.ops.decoder_layers`) takes of
            the layer; ``after_attention`` has the others. None: it does not take the layer.
    """

    attention: tuple
    after_attention: tuple
    decoder: tuple | None = None


class ArgumentsByType(NamedTuple):
    """The fixed arguments of layers as the ops of all layers take them: ``NO_TENSOR`` stands for None."""

    tensors: list[Tensor]
    integers: list[int]
    reals: list[float]

    @classmethod
    def of(cls, parts: Iterable[tuple]) -> "ArgumentsByType":
        """The arguments of several ops, one after the other."""
        tensors, integers, reals = list[Tensor](), list[int](), list[float]()
        for argument in (each for part in parts for each in part):
            if isinstance(argument, list):  # a packed weight
                tensors += argument
            elif argument is None or isinstance(argument, Tensor):
                tensors.append(NO_TENSOR if argument is None else argument)
            elif isinstance(argument, float):
                reals.append(argument)
            else:
                integers.append(argument)
        return cls(tensors, integers, reals)


NO_TENSOR = torch.empty(0)


class ProjectedPositions(NamedTuple):
    """The keys and the queries of all rows of a table of relative positions, each (rows, num_heads, head_dim) or None
    without its term."""

    keys: Tensor | None
    queries: Tensor | None


class Prepared(NamedTuple):
    """Copies of a layer's weights in the forms that the ways read; a form that was not made is None.

    Fields:
        weights: the layer's weights themselves as they were then, so that a frozen layer does not look them up again.
        packed: for CPU inference.
        int8: for CPU inference in 8 bits.
        stacked: q, k and v in one tensor, and a gated ``up`` in one tensor, for ways that read plain weights.
        cast: in autocast's dtype, for the fused sublayers.
        positions: relative positions that are projected once, for CPU inference.
        fixed: for layers that CPU inference always runs in the same ops (:mod:`fastenc.nn.frozen_layers`).
    """

    weights: LayerWeights | None = None
    packed: PackedWeights | None = None
    int8: Int8Weights | None = None
    stacked: LayerWeights | None = None
    cast: CastWeights | None = None
    positions: ProjectedPositions | None = None
    fixed: FixedArguments | None = None


NOT_PREPARED = Prepared()


class LayerCall(NamedTuple):
    """The arguments of one layer.

    Fields:
        adaptation: what :mod:`fastenc.adapt` adds to the layer, or None.
        prepared: copies of the weights that were made before (:func:`fastenc.freeze`, ``cast_weights``).
    """

    state: LayerState
    inputs: AttentionInputs
    weights: LayerWeights
    spec: LayerSpec
    dropout: LayerDropout = NO_DROPOUT
    adaptation: LayerAdaptation | None = None
    prepared: Prepared = NOT_PREPARED

    def plain_weights(self) -> LayerWeights:
        """The weights for a way that reads them as they are: stacked, if that was prepared."""
        return self.prepared.stacked or self.weights

    def features(self) -> frozenset[str]:
        """The names of everything in this call that a way must know in order to take it."""
        used = self.spec.features | given_fields(self.inputs, DERIVED_INPUTS)
        if self.weights._field_defaults:
            # torch.compile in torch 2.11 cannot trace |= of frozensets.
            used = used | given_fields(self.weights)
        if self.dropout is not NO_DROPOUT:
            used = used | {f"{name}_dropout" for name in self.dropout.probabilities()}
        return used if self.adaptation is None else used | {"adaptation"}
