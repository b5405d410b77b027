"""LayerNorm and RMSNorm modules over the fused op; parameters and state-dict keys are torch.nn's."""

import torch
from torch import Tensor, nn

from fastenc.ops import layer_norm, rms_norm


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last dimension, whose forward can also add bias, dropout and residual.

    ``forward(x, residual=None, x_bias=None, dropout_p=0.0)`` computes LN(residual + dropout(x + x_bias)). Dropout is
    applied in training mode only. x and residual: (..., hidden_size); x_bias: (hidden_size,).
    Raises: ValueError when ``normalized_shape`` has more than one dimension.
    """

    def __init__(self, normalized_shape, *args, **kwargs):
        super().__init__(normalized_shape, *args, **kwargs)
        _check_one_dimension(self)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        x_bias: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        dropout_p = dropout_p if self.training else 0.0
        return layer_norm(
            x,
            self.weight,
            self.bias,
            residual=residual,
            x_bias=x_bias,
            dropout_p=dropout_p,
            eps=self.eps,
        )


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last dimension, with the forward of :class:`LayerNorm`.

    ``eps=None`` means the machine epsilon of the input's dtype, as in torch.
    Raises: ValueError when ``normalized_shape`` has more than one dimension.
    """

    def __init__(self, normalized_shape, *args, **kwargs):
        super().__init__(normalized_shape, *args, **kwargs)
        _check_one_dimension(self)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        x_bias: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        dropout_p = dropout_p if self.training else 0.0
        return rms_norm(
            x, self.factor(), residual=residual, x_bias=x_bias, dropout_p=dropout_p, eps=eps
        )

    def factor(self) -> Tensor | None:
        """What the normalised rows are multiplied by."""
        return self.weight


class OffsetRMSNorm(RMSNorm):
    """:class:`RMSNorm` that multiplies by 1 + weight, as Gemma's does; its weight begins at 0."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def factor(self) -> Tensor:
        return 1.0 + self.weight.float()


def _check_one_dimension(module) -> None:
    if len(module.normalized_shape) != 1:
        raise ValueError(
            f"normalized_shape must be one dimension, got {tuple(module.normalized_shape)}: "
            "use the torch.nn module for more"
        )
