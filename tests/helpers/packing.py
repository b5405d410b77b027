"""Padded batches, and the checks that CPU and GPU tests share."""

import torch

from fastenc import ops, packing


def batch_of(lengths, length, device="cpu"):
    """Padded on the right."""
    mask = torch.arange(length) < torch.tensor(lengths).view(-1, 1)
    return packing.pack(torch.zeros(len(lengths), length, dtype=torch.long), mask).to(device), mask


def check_both_ways(lengths, length, shape, dtype, impl, device="cpu"):
    """Compare values and gradients with boolean indexing."""
    batch, mask = batch_of(lengths, length, device)
    real = mask.to(device)
    padded = torch.randn(len(lengths), length, *shape, device=device).to(dtype).requires_grad_()
    packed = ops.pack(padded, batch, impl=impl)
    assert torch.equal(packed, padded[real])
    dy = torch.randn(packed.shape, device=device).to(dtype)
    (dx,) = torch.autograd.grad(packed, padded, dy)
    assert torch.equal(dx[real], dy) and not dx[~real].any()
    values = torch.randn(packed.shape, device=device).to(dtype).requires_grad_()
    result = ops.unpack(values, batch, impl=impl)
    assert result.dtype == dtype and torch.equal(
        result, torch.zeros_like(result).index_put((real,), values)
    )
    dy = torch.randn(result.shape, device=device).to(dtype)
    (dvalues,) = torch.autograd.grad(result, values, dy)
    assert torch.equal(dvalues, dy[real])
