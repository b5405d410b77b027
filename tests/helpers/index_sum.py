"""The check that CPU and GPU tests share."""

import torch

from fastenc.ops._index_sum import index_sum
from fastenc.testing import assert_within_budget


def check_budget(dtype, count, width, size, device="cpu"):
    """Compare with torch's index_add, with an offset and a padding row."""
    rows = torch.randn(count, width, device=device).to(dtype)
    index = torch.randint(-2, size - 2, (count,), device=device)
    for padding_idx in (-1, size // 2):
        ours = index_sum(rows, index, size, 2, padding_idx)
        assert ours.dtype == dtype
        plain, exact = (
            torch.zeros(size, width, dtype=sum_dtype, device=device).index_add(
                0, index + 2, rows.to(sum_dtype)
            )
            for sum_dtype in (torch.float32, torch.float64)
        )
        if padding_idx >= 0:
            plain[padding_idx] = exact[padding_idx] = 0
        assert_within_budget(ours, plain.to(dtype), exact, f"{dtype} sums")
