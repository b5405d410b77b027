"""Gated activations as modules over the fused op."""

from torch import Tensor, nn

from fastenc.ops import bias_glu


class GEGLU(nn.Module):
    """gelu(a) * b for x = (a, b) in halves of the last dimension; ``approximate`` as in torch.nn.GELU.

    ``forward(x, bias=None)`` adds a bias to both halves first: that of the linear layer before it.
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
    """silu(a) * b for x = (a, b) in halves of the last dimension; ``forward(x, bias=None)`` adds a bias first."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return bias_glu(x, bias, activation="silu")
