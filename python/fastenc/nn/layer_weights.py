"""The weights of a layer, as its ways of running take them."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastenc.nn.layer_spec import NormSpec


class CrossWeights(NamedTuple):
    """The weights of the sublayer that attends to a source. Those of k and v are one stacked tensor, or two."""

    query_weight: Tensor
    query_bias: Tensor | None
    key_value_weights: tuple[Tensor, ...]
    key_value_biases: tuple[Tensor | None, ...]
    out_weight: Tensor
    out_bias: Tensor | None
    norm_weight: Tensor
    norm_bias: Tensor | None


class GlobalWeights(NamedTuple):
    """The weights and biases of q, k and v where global tokens attend, one stacked tensor or several."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]


class LayerVectorWeights(NamedTuple):
    """The weights of the sublayer that a layer's vectors gate (:mod:`fastenc.nn.layer_vectors`).

    ``scale``: (1,), the factor of the layer's output.
    """

    gate: Tensor
    out: Tensor
    norm: Tensor
    scale: Tensor


# Norms of queries and keys, and norms of the two sublayers' outputs, which only some families have.
OWN_NORMS = ("query_norm", "key_norm", "attention_own_norm", "down_own_norm")
OwnNormFactors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class LayerWeights(NamedTuple):
    """Weights (out_features, in_features) and biases (out_features,), which may be None.

    The weights of q, k and v are one stacked tensor or several, and so are the two halves of a gated ``up``. The norms
    are those that end the two sublayers. The position weights project relative positions; without any of them, those of
    q and k do. ``query_norm_weight`` and ``key_norm_weight`` are (head_dim,), or (num_heads * head_dim,) for a norm of
    all heads together. The own norms are those of the sublayers' outputs.
    """

    qkv_weights: tuple[Tensor, ...]
    qkv_biases: tuple[Tensor | None, ...]
    attention_out_weight: Tensor
    attention_out_bias: Tensor | None
    attention_norm_weight: Tensor
    attention_norm_bias: Tensor | None
    up_weights: tuple[Tensor, ...]
    up_biases: tuple[Tensor | None, ...]
    down_weight: Tensor
    down_bias: Tensor | None
    out_norm_weight: Tensor
    out_norm_bias: Tensor | None
    position_key_weight: Tensor | None = None
    position_key_bias: Tensor | None = None
    position_query_weight: Tensor | None = None
    position_query_bias: Tensor | None = None
    query_norm_weight: Tensor | None = None
    key_norm_weight: Tensor | None = None
    attention_own_norm_weight: Tensor | None = None
    down_own_norm_weight: Tensor | None = None
    cross: CrossWeights | None = None
    global_qkv: GlobalWeights | None = None
    layer_vectors: LayerVectorWeights | None = None

    def of_linear(self, name: str) -> tuple[Tensor, ...]:
        """The stacked weights of the product "qkv", "attention_out", "up" or "down"."""
        several = {"qkv": self.qkv_weights, "up": self.up_weights}
        return several[name] if name in several else (getattr(self, f"{name}_weight"),)

    def tensors(self) -> list[Tensor]:
        """All tensors that are not None."""
        return _tensors_in(self)

    def after_self_attention(self) -> "LayerWeights":
        """The weights of a layer whose attention is the one to the source: that sublayer and the feed-forward one."""
        assert self.cross is not None  # only layers with that sublayer ask
        c = self.cross
        return self._replace(
            attention_out_weight=c.out_weight,
            attention_out_bias=c.out_bias,
            attention_norm_weight=c.norm_weight,
            attention_norm_bias=c.norm_bias,
        )


def _tensors_in(values: tuple) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, tuple):
            tensors += _tensors_in(value)
        elif value is not None:
            tensors.append(value)
    return tensors


class CastWeights(NamedTuple):
    """The weights of a layer's matrix products in autocast's dtype; several tensors of qkv or up are stacked.

    ``cross``: those of the queries, the keys and values, and the output of the attention to a source, or None.
    """

    qkv_weight: Tensor
    qkv_bias: Tensor | None
    attention_out_weight: Tensor
    up_weight: Tensor
    down_weight: Tensor
    cross: tuple[Tensor, Tensor, Tensor] | None = None


def norm_factor(weight: Tensor, spec: NormSpec) -> Tensor:
    """What a norm multiplies by, of its module's weight. 1 + weight is float32, as in transformers."""
    return 1.0 + weight.float() if spec.plus_one else weight


def own_norm_factors(norms: Iterable[Any], spec: NormSpec) -> OwnNormFactors:
    """The factors of the modules in the order of ``OWN_NORMS``, None for one that the layer lacks.

    ``spec``: that of any norm of the layer, since all are of one kind.
    """
    factors = (None if norm is None else norm_factor(norm.weight, spec) for norm in norms)
    query, key, attention, down = factors
    return query, key, attention, down


def parameters_of(linear: Any) -> tuple[Any, Tensor | None]:
    """(weight, bias) of a linear layer, or (None, None) if the layer lacks it."""
    return (None, None) if linear is None else (linear.weight, linear.bias)


def stack(tensors: tuple[Tensor, ...]) -> Tensor:
    """The tensors concatenated along the first dimension; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def stack_biases(biases: tuple[Tensor | None, ...], weights: tuple[Tensor, ...]) -> Tensor | None:
    """The concatenated biases of stacked weights, 0 for a weight without bias; None if no weight has one."""
    if len(biases) == 1:
        return biases[0]
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, weights, strict=True)
    return stack(tuple(w.new_zeros(w.shape[0]) if b is None else b for b, w in pairs))


def stacked(weights: LayerWeights) -> LayerWeights:
    """The weights with those of q, k and v, of a gated ``up``, of a source's k and v, and of global tokens in
    one tensor each."""
    w, c, g = weights, weights.cross, weights.global_qkv
    return w._replace(
        cross=None
        if c is None
        else c._replace(
            key_value_weights=(stack(c.key_value_weights),),
            key_value_biases=(stack_biases(c.key_value_biases, c.key_value_weights),),
        ),
        global_qkv=None
        if g is None
        else GlobalWeights((stack(g.weights),), (stack_biases(g.biases, g.weights),)),
        qkv_weights=(stack(w.qkv_weights),),
        qkv_biases=(stack_biases(w.qkv_biases, w.qkv_weights),),
        up_weights=(stack(w.up_weights),),
        up_biases=(stack_biases(w.up_biases, w.up_weights),),
    )
