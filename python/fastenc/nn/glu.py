"""Gated activations as modules over the fused op."""

from torch import Tensor, nn

from fastenc.ops import bias_glu


class GEGLU(nn.Module):
    """gelu(a) * b, where a and b are the halves of x's last dimension; ``approximate`` as in torch.nn.GELU.

    ``forward(x, bias=None)`` first adds ``bias`` to x: the bias of the preceding linear layer. x: (..., 2 * width),
    floating point; bias: (2 * width,). The result is (..., width), x's dtype.
    Raises: ValueError for another ``approximate``, and in forward as :func:`fastenc.ops.bias_glu`.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, approximate: str = "none"):
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f"GEGLU: approximate must be 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return bias_glu(x, bias, activation="gelu_tanh" if self.approximate == "tanh" else "gelu")

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class SwiGLU(nn.Module):
    """silu(a) * b, where a and b are the halves of x's last dimension.

    ``forward(x, bias=None)`` first adds ``bias`` to x: the bias of the preceding linear layer. x: (..., 2 * width),
    floating point; bias: (2 * width,). The result is (..., width), x's dtype.
    Raises: in forward as :func:`fastenc.ops.bias_glu`.
    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return bias_glu(x, bias, activation="silu")
