"""Products that PyTorch has only on a GPU."""

import torch

from fastenc.ops import gemm


def widening_products_on_cpu(monkeypatch):
    """Give the CPU the product of bfloat16 matrices with a float32 result."""
    monkeypatch.setattr(gemm, "_widens", lambda a: a.dtype == torch.bfloat16)
    monkeypatch.setattr(gemm, "_widening_product", lambda a, b: a.float() @ b.float())
