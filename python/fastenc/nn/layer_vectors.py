"""A layer's third sublayer, which a vector of each token for this layer gates (per-layer embeddings of Gemma).

    e_i = RMSNorm(x_0 W_i^T / sqrt(hidden_size)),  y = c (s + RMSNorm((act(s W_g^T) * e_i) W_p^T))

x_0 is the embeddings' output, e_i the vectors for layer i, s the sum that the feed-forward sublayer ends with, and c a
number of the layer.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fastenc.nn.activation import activate_plain
from fastenc.nn.layer_inputs import LayerState
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.layer_weights import LayerWeights
from fastenc.ops import rms_norm
from fastenc.ops.gemm import linear_in_one_order


class LayerVectorTable(NamedTuple):
    """The weights that make the vectors of all layers: (layers * layer_vector_size, hidden_size), and of the norm."""

    projection: Tensor
    norm: Tensor


def layer_vectors(x: Tensor, table: LayerVectorTable, number: int, spec: LayerSpec) -> Tensor:
    """e_i (total_tokens, layer_vector_size) of the embeddings' output x (total_tokens, hidden_size) for layer
    ``number``.

    The division by sqrt(hidden_size) is left out, and the norm's eps is larger by its square: the quotient is the same.
    """
    size = spec.layer_vector_size
    rows = table.projection[number * size : (number + 1) * size]
    return rms_norm(linear_in_one_order(x, rows), table.norm, eps=spec.out_norm.eps * x.shape[-1])


def add_gated(
    s: Tensor,
    vectors: Tensor,
    w: LayerWeights,
    spec: LayerSpec,
    multiply_gate: Callable[[Tensor], Tensor],
    multiply_out: Callable[[Tensor], Tensor],
) -> LayerState:
    """The layer's end: (Norm(y), y) for the sum s (tokens, hidden_size) after the feed-forward sublayer.

    Args: vectors: of the same tokens. multiply_gate, multiply_out: x -> x W_g^T and x W_p^T.
    """
    v = w.layer_vectors
    assert v is not None  # every layer with vectors has these weights
    gate = activate_plain(multiply_gate(s), None, spec.feed_forward.activation)
    added = multiply_out(gate * vectors.to(gate.dtype))
    eps = spec.out_norm.eps
    added = rms_norm(added, v.norm * v.scale, eps=eps)
    y, total = rms_norm(
        added,
        w.out_norm_weight,
        residual=s * v.scale.to(s.dtype),
        eps=eps,
        return_residual_sum=True,
    )
    return LayerState(y, total)
