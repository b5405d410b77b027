"""The description of one transformer encoder layer.

All ways of running a layer (:mod:`fastenc.nn.ways`) read only this, the weights and the inputs of a call; none knows
the name of an architecture. A field with a default is a feature: a way that does not name it refuses the layers that
use it (:mod:`fastenc.nn.features`).

Post-norm and pre-norm layers run as the same program, in which each sublayer ends with a norm. They differ in what the
next sublayer's output is added to: the norm's output (post-norm) or the norm's input (pre-norm). Therefore a pre-norm
layer's norms are shifted by one: its ``out_norm`` is the first norm of the following layer, or the stack's last norm.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastenc.nn.features import features_of, size


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
        normalises_values: each head's values have that norm too, without a weight.
        normalises_heads_together: in place of that RMSNorm, a token's queries have one LayerNorm over all heads, and so
            have its keys.
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
    normalises_values: bool = False
    normalises_heads_together: bool = False

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
        layer_vector_size: width of the vector that each token has for this layer, and that gates a third sublayer
            (:mod:`fastenc.nn.layer_vectors`); 0: no such sublayer. The feed-forward sublayer then ends without a norm.
        features: the names of all fields, also of the descriptions inside, that have another value than the default.
        norm_types: the types of the norms that end the sublayers.
    Raises: ValueError for ``own_norms`` with ``cross_norm``: no family has a norm of that sublayer's output; and for
        ``layer_vector_size`` without ``pre_norm``, ``own_norms`` and RMSNorm.
    """

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    attention_norm: NormSpec
    out_norm: NormSpec
    pre_norm: bool = False
    cross_norm: NormSpec | None = None
    own_norms: bool = False
    layer_vector_size: int = 0
    features: frozenset[str] = field(init=False, repr=False, compare=False)
    norm_types: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.own_norms and self.cross_norm is not None:
            raise ValueError(
                "a layer with own_norms cannot attend to a source, got cross_norm: own norms of that sublayer's output "
                "are not computed"
            )
        norms = (self.attention_norm, self.cross_norm, self.out_norm)
        types = frozenset(norm.norm_type for norm in norms if norm is not None)
        if self.layer_vector_size and not (self.pre_norm and self.own_norms and types == {"rms"}):
            raise ValueError(
                "a layer with layer vectors must have pre_norm, own_norms and RMSNorm, got another layer: other ends "
                "of that sublayer are not computed"
            )
        object.__setattr__(self, "features", features_of(self))
        object.__setattr__(self, "norm_types", types)
