"""The head of a classification model: a linear layer, and the layers that an architecture has before it."""

import torch.nn.functional as F
from torch import Tensor, nn

from fastenc.models.architectures.modules import HeadSpec
from fastenc.models.config import EncoderConfig
from fastenc.nn.activation import activate_plain
from fastenc.nn.embeddings import make_norm
from fastenc.nn.evaluation_mode import trains
from fastenc.nn.layer_spec import NormSpec


class PredictionHead(nn.ModuleDict):
    """logits = dropout(Norm(act(dropout(x) W + b))) W_out + b_out; the HeadSpec says which of these steps exist.

    With a feed-forward sublayer, its output Norm(x + dropout(act(dropout(x) W_up + b_up) W_down + b_down)) is in place
    of the dense layer's.

    x: (rows, hidden_size); logits: (rows, outputs). Modules: "dense" (W, b), "up", "down", "norm", "out" (W_out,
    b_out or none).
    Raises: ValueError for a family that has no such head.
    """

    def __init__(
        self, config: EncoderConfig, spec: HeadSpec | None, outputs: int, dropout_p: float
    ):
        super().__init__()
        if spec is None:
            raise ValueError(
                f"the model's family must have a head for this task, got {config.family}: take a model of another "
                "family"
            )
        spec = config.architecture.head(config, spec)
        self.spec, self.dropout_p = spec, dropout_p
        self.activation = spec.kernel_activation(config.activation)
        p = spec.dropout_before_p
        self.dropout_before_p = dropout_p if p is None else p
        width = config.hidden_size
        if "dense" in spec.names:
            self["dense"] = nn.Linear(width, width, bias=spec.dense_bias)
        if "up" in spec.names:
            self["up"] = nn.Linear(width, config.intermediate_size)
            self["down"] = nn.Linear(config.intermediate_size, width)
        if "norm" in spec.names:
            bias = config.architecture.biases(config).norm
            self["norm"] = make_norm(NormSpec("layer", config.eps), width, bias)
        self["out"] = nn.Linear(width, outputs, bias=spec.out_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.transform(x))

    def transform(self, x: Tensor) -> Tensor:
        """What the head computes before its last dropout and layer, (rows, hidden_size)."""
        if "dense" in self:
            x = self["dense"](self._drop_before(x))
            x = activate_plain(x, None, self.activation)
        if "up" in self:
            inner = self["up"](self._drop_before(x))
            down = self["down"](activate_plain(inner, None, self.activation))
            x = x + F.dropout(down, self.dropout_p, trains(self))
        return self["norm"](x) if "norm" in self else x

    def last(self, x: Tensor) -> Tensor:
        """The last dropout and layer: the logits for the results of :meth:`transform`."""
        return self["out"](F.dropout(x, self.dropout_p, trains(self) and self.spec.dropout_after))

    def _drop_before(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout_before_p, trains(self) and self.spec.dropout_before)

    def names(self, prefix: str) -> dict[str, str]:
        """Name of a module in our model (with ``prefix``) → its name in the checkpoint."""
        return {f"{prefix}.{ours}": theirs for ours, theirs in self.spec.names.items()}
