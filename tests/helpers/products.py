"""Products that PyTorch has on a GPU only."""

import torch

from fastenc.ops import _gemm


def widening_products_on_cpu(monkeypatch):
    """Let matrices of bfloat16 be multiplied into float32."""
    monkeypatch.setattr(_gemm, "_widens", lambda a: a.dtype == torch.bfloat16)
    monkeypatch.setattr(_gemm, "_widening_product", lambda a, b: a.float() @ b.float())
