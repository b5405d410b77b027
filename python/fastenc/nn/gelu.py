"""GELU module over the fused op."""

from torch import Tensor, nn

from fastenc.ops import bias_gelu


class GELU(nn.GELU):
    """``torch.nn.GELU(approximate="none"|"tanh")`` whose ``forward(x, bias=None)`` computes gelu(x + bias).

    x: (..., width), floating point; bias: (width,). The result has x's shape and dtype. Formulas, numerics and errors:
    :func:`fastenc.ops.bias_gelu`.
    """

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return bias_gelu(x, bias, approximate=self.approximate)
