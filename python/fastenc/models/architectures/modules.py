"""Which modules the encoders and heads of a family have."""

from dataclasses import dataclass
from typing import NamedTuple

from fastenc.ops.activation import ACTIVATIONS


@dataclass(frozen=True)
class Biases:
    """Which linear layers and norms of an encoder have a bias; norm: those of the layers; last_norm: the one after the
    last layer, which only pre-norm layers have.

    Without ``key``, the biases of q and v are parameters of their own (``query_bias``, ``value_bias``), and the
    positions' own projection to keys has none either.
    """

    qkv: bool = True
    attention_out: bool = True
    up: bool = True
    down: bool = True
    norm: bool = True
    embedding_norm: bool = True
    last_norm: bool = True
    key: bool = True


class PositionModules(NamedTuple):
    """Rows of the table of relative positions (0: no table), whether it has a norm, and the terms ("c2p", "p2c") for
    which a layer has a projection of its own."""

    rows: int = 0
    norm: bool = False
    own_projections: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeadSpec:
    """A head: an optional dense layer Norm(act(x W + b)) or feed-forward sublayer, and a last linear layer.

    A masked-LM head may have an inner layer act(x W) before the dense layer.

    Fields:
        names: module of the head ("inner", "dense", or "up" and "down" of the sublayer; "norm"; "out" or "decoder" and
            "bias") → name in the checkpoint without the prefix. A module that is not named does not exist.
        activation: "gelu", "gelu_tanh", "silu", "relu" or "tanh"; None: the configuration's.
        inner_size: outputs of the inner layer.
        dense_bias, out_bias: whether the dense layer and the last linear layer have a bias.
        decoder_has_bias: whether the module of a masked-LM head's decoder has the bias that is added to the logits.
        dropout_before: whether dropout precedes the dense layer or the sublayer.
        dropout_before_p: its probability; None: that of the dropout before the last linear layer.
        dropout_after: whether dropout precedes the last linear layer.
        pooler: whether the head reads the encoder's pooler instead of a token's vector.
    """

    names: dict[str, str]
    activation: str | None = "gelu"
    inner_size: int = 0
    dense_bias: bool = True
    out_bias: bool = True
    decoder_has_bias: bool = True
    dropout_before: bool = False
    dropout_before_p: float | None = None
    dropout_after: bool = True
    pooler: bool = False

    def kernel_activation(self, default: str) -> str:
        """The activation's name in the kernels, or "tanh". ``default``: the configuration's."""
        name = self.activation or default
        return ACTIVATIONS.get(name, name)
