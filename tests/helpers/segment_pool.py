"""Offsets, torch's own pooling, and the checks that CPU and GPU tests share."""

import torch

from fastenc.ops import segment_pool
from fastenc.testing import assert_within_budget

MODES = ("cls", "mean", "max")
# The plain computation for one sequence, in its own dtype. torch.max gives the gradient to one token.
PLAIN = {"cls": lambda x: x[0], "mean": lambda x: x.mean(0), "max": lambda x: x.max(0).values}


def offsets(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def check_against_plain(lengths, width, dtype, mode, impl, device="cpu"):
    """Compare values and gradient with a loop over the sequences, in the dtype and in float64."""
    x = torch.randn(sum(lengths), width, device=device).to(dtype).requires_grad_()
    dy = torch.randn(len(lengths), width, device=device).to(dtype)
    loop = lambda v: torch.stack([PLAIN[mode](part) for part in v.split(lengths)])
    wide = x.detach().double().requires_grad_()
    y, plain, truth = (
        segment_pool(x, offsets(lengths, device), mode, impl=impl),
        loop(x),
        loop(wide),
    )
    assert_within_budget(y, plain, truth, f"{mode} {dtype} y")
    (ours,), (theirs,) = (torch.autograd.grad(v, x, dy) for v in (y, plain))
    (exact,) = torch.autograd.grad(truth, wide, dy.double())
    assert_within_budget(ours, theirs, exact, f"{mode} {dtype} dx")
