"""The description of one transformer encoder layer, its weights, and the inputs of a call.

All ways of running a layer (:mod:`fastenc.nn.ways`) read only these; none knows the name of an architecture. A field
with a default is a feature: a way that does not name it refuses the layers that use it (:mod:`fastenc.nn.features`).

Post-norm and pre-norm layers run as the same program, in which each sublayer ends with a norm. They differ in what the
next sublayer's output is added to: the norm's output (post-norm) or the norm's input (pre-norm). Therefore a pre-norm
layer's norms are shifted by one: its ``out_norm`` is the first norm of the following layer, or the stack's last norm.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastenc.nn.features import features_of, size
from fastenc.nn.layer_cache import LayerCache
from fastenc.ops import checks
from fastenc.ops.attention_blocks import AttentionBlocks
from fastenc.ops.block_sparse_attention import BlockPlan


@dataclass(frozen=True)
class NormSpec:
    """LayerNorm (norm_type "layer") or RMSNorm (norm_type "rms"). The weights show whether it has a bias.

    ``plus_one``: the factor is 1 + weight (Gemma); :func:`norm_factor` makes it of a module's weight.
    """

    norm_type: str = "layer"
    eps: float = size(default=1e-12)
    plus_one: bool = size(default=False)


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention of one layer.

    Fields:
        head_dim: width of a head; num_heads * head_dim may differ from the hidden size.
        scale: factor of the scores before the softmax.
        window: number of tokens that a token sees on the left and on the right, -1 without a limit.
        position_terms: the terms that relative positions add to the scores: "c2p" (a query times a position's key),
            "p2c" (a key times a position's query); see :func:`fastenc.ops.disentangled_attention`.
        block_size: tokens of a block in block-sparse attention (:mod:`fastenc.nn.block_plan`); 0: without blocks.
        random_blocks: number of random blocks that a block sees.
        global_attention: the batch's global tokens see all tokens and are seen by all; see
            :func:`fastenc.ops.global_window_attention`.
        interleaved: the rows of the weight are head by head those of its q, k and v, not all of q, then k, then v.
        rotates_neighbours: the i-th rotary angle rotates the columns 2 i and 2 i + 1 of a head, not i and
            i + head_dim / 2. :meth:`split_qkv` sorts the columns of q and k so that the kernels' rotation is this one.
            A score, a sum over the columns, does not depend on their order.
        key_heads: number of heads of keys and values, which divides num_heads; head h of the queries reads head
            h // (num_heads / key_heads). 0: num_heads. Source: Ainslie et al. 2023, arXiv:2305.13245.
        head_norm_eps: eps of an RMSNorm of each head's queries and keys before the rotation; None: no such norm.
    Rotary angles, relative biases and relative positions are tensors and belong to :class:`AttentionInputs`.
    """

    num_heads: int
    head_dim: int
    scale: float
    window: tuple[int, int] = (-1, -1)
    position_terms: tuple[str, ...] = ()
    block_size: int = 0
    random_blocks: int = 0
    interleaved: bool = False
    global_attention: bool = False
    key_heads: int = 0
    head_norm_eps: float | None = None
    rotates_neighbours: bool = False

    @property
    def sorts_qkv(self) -> bool:
        """Whether the product has q, k and v in another order than the kernels read them."""
        return self.interleaved or self.rotates_neighbours

    @property
    def heads(self) -> tuple[int, int, int]:
        """The numbers of heads of q, k and v."""
        return self.num_heads, self.key_heads or self.num_heads, self.key_heads or self.num_heads

    def split_qkv(self, qkv: Tensor) -> Tensor:
        """The product (tokens, 3 num_heads head_dim) as (tokens, 3, num_heads, head_dim).

        With ``key_heads`` it is (tokens, num_heads + 2 key_heads, head_dim). The result is a view, with
        ``rotates_neighbours`` a copy.
        """
        if self.rotates_neighbours:
            return self._change_qk(self._view_qkv(qkv), neighbours_to_halves)
        return self._view_qkv(qkv)

    def parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, each (tokens, heads, head_dim), of the result of :meth:`split_qkv`."""
        return qkv.split(self.heads, 1) if self.key_heads else qkv.unbind(1)

    def join_qkv(self, qkv: Tensor) -> Tensor:
        """The inverse of :meth:`split_qkv`; a copy with ``sorts_qkv``."""
        if self.rotates_neighbours:
            qkv = self._change_qk(qkv, halves_to_neighbours)
        return (qkv.transpose(1, 2) if self.interleaved else qkv).flatten(1)

    def _view_qkv(self, qkv: Tensor) -> Tensor:
        if self.key_heads:
            return qkv.view(len(qkv), sum(self.heads), self.head_dim)
        if self.interleaved:
            return qkv.view(len(qkv), self.num_heads, 3, self.head_dim).transpose(1, 2)
        return qkv.view(len(qkv), 3, self.num_heads, self.head_dim)

    def _change_qk(self, qkv: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        count = sum(self.heads[:2]) if self.key_heads else 2
        return torch.cat((change(qkv[:, :count]), qkv[:, count:]), 1)

    def bias_without_key(self, query: Tensor, value: Tensor) -> Tensor:
        """The bias of the product, from those of q and v; that of k is 0."""
        return self.join_qkv(
            torch.stack((query, torch.zeros_like(query), value)).view(
                1, 3, self.num_heads, self.head_dim
            )
        )[0]


def neighbours_to_halves(x: Tensor) -> Tensor:
    """The columns 0, 2, 4, ... of each head (..., head_dim), then 1, 3, 5, ..."""
    return x.unflatten(-1, (-1, 2)).mT.flatten(-2)


def halves_to_neighbours(x: Tensor) -> Tensor:
    """The inverse of :func:`neighbours_to_halves`."""
    return x.unflatten(-1, (2, -1)).mT.flatten(-2)


@dataclass(frozen=True)
class FeedForwardSpec:
    """act(x W_up + b_up) W_down + b_down; gated: (act(u) * v) W_down + b_down, (u, v) the halves of x W_up + b_up.

    ``activation`` is "gelu", "gelu_tanh", "silu" or "relu".
    """

    intermediate_size: int
    activation: str = "gelu"
    gated: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One layer.

    Fields:
        pre_norm: a sublayer's output is added to the preceding norm's input, not to its output.
        cross_norm: the norm that ends the sublayer between the other two, whose queries are the layer's tokens and
            whose keys are those of a source, with heads as in ``attention``; None: the layer has no such sublayer.
        own_norms: a sublayer's output has a norm of its own before it is added, like ``attention_norm`` or ``out_norm``
            but with another weight (Gemma).
        features: the names of all fields, also of the descriptions inside, that have another value than the default.
        norm_types: the types of the norms that end the sublayers.
    Raises: ValueError for ``own_norms`` with ``cross_norm``: no family has a norm of that sublayer's output.
    """

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    attention_norm: NormSpec
    out_norm: NormSpec
    pre_norm: bool = False
    cross_norm: NormSpec | None = None
    own_norms: bool = False
    features: frozenset[str] = field(init=False, repr=False, compare=False)
    norm_types: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.own_norms and self.cross_norm is not None:
            raise ValueError(
                "a layer with own_norms cannot attend to a source, got cross_norm: own norms of that sublayer's output "
                "are not computed"
            )
        object.__setattr__(self, "features", features_of(self))
        norms = (self.attention_norm, self.cross_norm, self.out_norm)
        types = frozenset(norm.norm_type for norm in norms if norm is not None)
        object.__setattr__(self, "norm_types", types)


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


# RMSNorms of queries and keys, and norms of the two sublayers' outputs, which only some families have.
OWN_NORMS = ("query_norm", "key_norm", "attention_own_norm", "down_own_norm")
OwnNormFactors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class LayerWeights(NamedTuple):
    """Weights (out_features, in_features) and biases (out_features,), which may be None.

    The weights of q, k and v are one stacked tensor or several, and so are the two halves of a gated ``up``. The norms
    are those that end the two sublayers. The position weights project relative positions; without any of them, those of
    q and k do. ``query_norm_weight`` and ``key_norm_weight`` are (head_dim,); the own norms are those of the sublayers'
    outputs.
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


class LayerDropout(NamedTuple):
    """Dropout probabilities of one layer, 0 in evaluation.

    Fields:
        attention: of the softmax weights; attention_out: of the attention sublayer's output.
        inner: of the feed-forward layer's activations; down: of the feed-forward sublayer's output.
        positions: of the embeddings of relative positions, before they are projected.
        cross, cross_out: as attention and attention_out, of the sublayer that attends to a source.
        rng_states: int64 (2,) for each of attention, attention_out, down, cross and cross_out, seed and offset of the
            mask, as :func:`with_rng_states` makes them for all layers. None: the op takes a random state.
    """

    attention: float = 0.0
    attention_out: float = 0.0
    inner: float = 0.0
    down: float = 0.0
    positions: float = 0.0
    cross: float = 0.0
    cross_out: float = 0.0
    rng_states: tuple[Tensor | None, ...] = (None,) * 5

    def probabilities(self) -> dict[str, float]:
        """Name → probability of each dropout that is on."""
        names = (name for name in self._fields if name != "rng_states")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    def after_self_attention(self) -> "LayerDropout":
        """As :meth:`LayerWeights.after_self_attention`."""
        _, _, down, *of_cross = self.rng_states
        return self._replace(
            attention=self.cross, attention_out=self.cross_out, rng_states=(*of_cross, down)
        )


NO_DROPOUT = LayerDropout()


def with_rng_states(dropouts: Sequence[LayerDropout], device: torch.device) -> list[LayerDropout]:
    """The layers' dropout with random states, which one call of the generator (one launch on a GPU) makes for all."""
    if all(dropout is NO_DROPOUT or not dropout.probabilities() for dropout in dropouts):
        return list(dropouts)
    # Encoders draw no states for sublayers that they lack, so a seed gives them the masks that it always gave.
    crosses = any(dropout.cross or dropout.cross_out for dropout in dropouts)
    masks = len(NO_DROPOUT.rng_states) if crosses else 3
    states = checks.draw_rng_states(device, masks * len(dropouts))
    missing = NO_DROPOUT.rng_states[masks:]
    return [
        dropout._replace(rng_states=(*states[masks * i : masks * (i + 1)], *missing))
        for i, dropout in enumerate(dropouts)
    ]


class RelativePositions(NamedTuple):
    """The embeddings of relative positions (rows, hidden_size), and int32 (2 R + 1,) the row of each distance key -
    query from -R to R; larger distances have the row of the last one. ``first``: the number in the table of the first
    of the rows."""

    embeddings: Tensor
    slots: Tensor
    first: int = 0


class Source(NamedTuple):
    """What the tokens of a decoder attend to.

    Fields:
        states: (source_tokens, hidden_size), an encoder's states of packed sequences.
        cu_seqlens, max_seqlen: these sequences.
        cu_targets, max_targets: the tokens of the layer's input that attend to each of them, as offsets. A sequence may
            have several targets, which follow each other.
    """

    states: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    cu_targets: Tensor
    max_targets: int


class AttentionInputs(NamedTuple):
    """Inputs of attention that depend on the batch and are shared by layers; see :func:`fastenc.ops.attention`.

    Fields:
        cu_seqlens, max_seqlen: the sequences.
        rotary: float32 (positions, rotary_dim), table of rotary angles, or None.
        relative_bias: (num_heads, 2 R + 1), or None.
        relative_positions: for disentangled attention, or None.
        block_plan: for block-sparse attention; None where every token of a sequence sees every other.
        bounds: int32 (2, total_tokens) from :func:`fastenc.ops.attention.sequence_bounds`, or None.
        blocks: tables from :func:`fastenc.ops.attention_blocks.attention_blocks`, or None.
        source: the source of layers that attend to one, or None.
        cache: the layer's keys and values of earlier tokens, to which this call adds its own, or None.
        global_tokens: int64 (G,), the indices of the global tokens, ascending; None without any.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    rotary: Tensor | None = None
    relative_bias: Tensor | None = None
    relative_positions: RelativePositions | None = None
    block_plan: BlockPlan | None = None
    bounds: Tensor | None = None
    blocks: AttentionBlocks | None = None
    source: Source | None = None
    cache: LayerCache | None = None
    global_tokens: Tensor | None = None


class LayerState(NamedTuple):
    """What one layer passes to the next, two tensors (total_tokens, hidden_size).

    Fields:
        x: input of the next sublayer.
        residual: what the next sublayer's output is added to; in post-norm stacks the same tensor as x.
    """

    x: Tensor
    residual: Tensor


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
