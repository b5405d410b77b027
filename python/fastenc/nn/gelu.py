"""GELU module over the fused op."""

from torch import Tensor, nn

from fastenc.ops import bias_gelu


class GELU(nn.GELU):
    """``torch.nn.GELU(approximate="none"|"tanh")`` whose ``forward(x, bias=None)`` computes gelu(x + bias)."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return bias_gelu(x, bias, approximate=self.approximate)
