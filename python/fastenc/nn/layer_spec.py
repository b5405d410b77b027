"""What one transformer encoder layer is: its description, its weights, and what it is called with.

Every way of running a layer (:mod:`fastenc.nn.layer_ways`) reads these and nothing else; none knows an architecture's
name. A stack of pre-norm layers is the same program as one of post-norm layers: each sublayer ends in a norm. Only what
that norm's sublayer adds its output to differs, the normalised vector (post-norm) or the sum before it (pre-norm). So
``out_norm`` of a pre-norm layer is the first norm of the layer after it, or the stack's last norm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastenc.ops import _checks
from fastenc.ops._attention_blocks import AttentionBlocks

# Name in a configuration → name in the kernels.
ACTIVATIONS: dict[str, str] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class NormSpec:
    """LayerNorm ("layer") or RMSNorm ("rms"); whether it has a bias is seen from the weights."""

    kind: str = "layer"
    eps: float = 1e-12


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention of one layer.

    Fields:
        head_dim: width of a head; num_heads * head_dim may differ from the hidden size.
        scale: factor of the scores before the softmax.
        window: tokens seen on the left and on the right, -1 without a limit.
    Rotary angles and relative biases are tensors of the batch: :class:`AttentionInputs`.
    """

    num_heads: int
    head_dim: int
    scale: float
    window: tuple[int, int] = (-1, -1)


@dataclass(frozen=True)
class FeedForwardSpec:
    """act(x W_up + b_up) W_down + b_down; gated: (act(u) * v) W_down with (u, v) the halves of x W_up + b_up.

    ``activation`` is a name of the kernels: "gelu", "gelu_tanh", "silu" or "relu".
    """

    intermediate_size: int
    activation: str = "gelu"
    gated: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One layer. ``pre_norm``: sublayers add to the sum before their norm, not to its output."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    attention_norm: NormSpec
    out_norm: NormSpec
    pre_norm: bool = False


class LayerWeights(NamedTuple):
    """Weights (out_features, in_features) and biases, which may be None.

    q, k and v, and a gated layer's two halves, are one tensor each or several that stand one above the other. The norms
    are those that end the two sublayers.
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

    def tensors(self) -> list[Tensor]:
        """All of them, without those that are None."""
        several = (*self.qkv_weights, *self.qkv_biases, *self.up_weights, *self.up_biases)
        rest = [value for value in self if not isinstance(value, tuple)]
        return [tensor for tensor in (*several, *rest) if tensor is not None]


class CastWeights(NamedTuple):
    """What a layer's products take, in autocast's dtype; q, k and v, and a gated layer's two halves, as one tensor."""

    qkv_weight: Tensor
    qkv_bias: Tensor | None
    attention_out_weight: Tensor
    up_weight: Tensor
    down_weight: Tensor


class LayerDropout(NamedTuple):
    """Probabilities; 0 in evaluation. ``inner`` is that of the feed-forward layer's activations.

    ``rng_states`` are the seeds and offsets of the masks of ``attention``, ``attention_out`` and ``down``, as
    :func:`with_rng_states` draws them for all layers at once. None: each mask draws its own.
    """

    attention: float = 0.0
    attention_out: float = 0.0
    inner: float = 0.0
    down: float = 0.0
    rng_states: tuple[Tensor | None, ...] = (None, None, None)


NO_DROPOUT = LayerDropout()


def with_rng_states(dropouts: Sequence[LayerDropout], device: torch.device) -> list[LayerDropout]:
    """Layers' dropout, with the random states of all masks from one draw: a GPU launches a kernel for each."""
    if not any(p > 0 for dropout in dropouts for p in dropout[:4]):
        return list(dropouts)
    states = _checks.draw_rng_states(device, 3 * len(dropouts))
    return [
        dropout._replace(rng_states=states[3 * i : 3 * i + 3]) for i, dropout in enumerate(dropouts)
    ]


class AttentionInputs(NamedTuple):
    """What attention needs of the batch and shares with other layers.

    Fields:
        cu_seqlens, max_seqlen: as in :func:`fastenc.ops.attention`.
        rotary: float32 (positions, rotary_dim), cosines beside sines, as :func:`fastenc.ops.rotary` takes them.
        relative_bias: (num_heads, 2 R + 1), as :func:`fastenc.ops.attention` takes it.
        bounds: (2, total_tokens), as :func:`fastenc.ops.attention.sequence_bounds` forms them once for all layers.
        blocks: of the batch, as :func:`fastenc.ops._attention_blocks.attention_blocks` makes them once for all layers.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    rotary: Tensor | None = None
    relative_bias: Tensor | None = None
    bounds: Tensor | None = None
    blocks: AttentionBlocks | None = None


class LayerState(NamedTuple):
    """What flows from layer to layer: the input ``x`` of the next sublayer and what that adds its output to.

    (total_tokens, hidden_size) both; after a post-norm layer they are one tensor.
    """

    x: Tensor
    residual: Tensor


def stack(tensors: tuple[Tensor, ...]) -> Tensor:
    """Several tensors one above the other, without a copy where there is one alone."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def stack_biases(biases: tuple[Tensor | None, ...], weights: tuple[Tensor, ...]) -> Tensor | None:
    """The bias of stacked weights, 0 where one of several has none; None where none has one."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, weights, strict=True)
    return stack(tuple(w.new_zeros(w.shape[0]) if b is None else b for b, w in pairs))


def stacked(weights: LayerWeights) -> LayerWeights:
    """The layer with q, k and v, and a gated layer's two halves, as one tensor each."""
    w = weights
    return w._replace(
        qkv_weights=(stack(w.qkv_weights),),
        qkv_biases=(stack_biases(w.qkv_biases, w.qkv_weights),),
        up_weights=(stack(w.up_weights),),
        up_biases=(stack_biases(w.up_biases, w.up_weights),),
    )


Reason = str | None
# A way of running a layer.
RunLayer = Callable[
    [LayerState, AttentionInputs, LayerWeights, LayerSpec, LayerDropout], LayerState
]
