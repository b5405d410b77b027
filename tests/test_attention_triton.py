"""The Triton kernels behind fastenc.ops.attention: on a GPU, or interpreted."""

import pytest
import torch

from fastenc.ops import attention
from fastenc.reference import attention as reference
from fastenc.testing import assert_within_budget
from test_attention import offsets_of, packed, plain


@pytest.fixture(params=[False, True], ids=["atomic", "deterministic"])
def deterministic(request):
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dim", [16, 32, 64, 96, 128])
def test_values_and_gradients_keep_the_budget_at_edge_lengths(triton_target, deterministic, dim):
    lengths = (1, 0, 63, 64, 65, 129) if dim == 32 else (5, 0, 70)
    for dtype in triton_target.dtypes:
        qkv, cu_seqlens, longest = packed(lengths, 2, dim, dtype)
        qkv = qkv.detach().to(triton_target.device).requires_grad_()
        cu_seqlens = cu_seqlens.to(triton_target.device)
        dout = torch.randn(qkv.shape[0], 2, dim, device=qkv.device).to(dtype)
        exact_qkv = qkv.detach().double().requires_grad_()
        out = attention(qkv, cu_seqlens, longest, impl=triton_target.impl)
        theirs = plain(qkv, lengths)
        exact = reference.attention(exact_qkv, cu_seqlens)
        assert_within_budget(out, theirs, exact, f"{dtype} out")
        assert_within_budget(
            torch.autograd.grad(out, qkv, dout)[0],
            torch.autograd.grad(theirs, qkv, dout)[0],
            torch.autograd.grad(exact, exact_qkv, dout.double())[0],
            f"{dtype} dqkv",
        )


def test_dropout_mask_and_gradient_are_the_references(triton_target, deterministic):
    lengths = (5, 70, 17)
    qkv, cu_seqlens, longest = packed(lengths, 3, 32)
    qkv = qkv.detach().to(triton_target.device).requires_grad_()
    cu_seqlens = cu_seqlens.to(triton_target.device)
    dout = torch.randn(qkv.shape[0], 3, 32, device=qkv.device)
    results = []
    for impl in (triton_target.impl, "reference"):
        torch.manual_seed(9)
        out = attention(qkv, cu_seqlens, longest, dropout_p=0.3, impl=impl)
        results.append((out, *torch.autograd.grad(out, qkv, dout)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_softmax_scale_strides_and_slack_in_max_seqlen(triton_target):
    device, impl = triton_target.device, triton_target.impl
    cu_seqlens = offsets_of((12, 8)).to(device)
    strided = torch.randn(20, 3, 4, 48)[..., 8:24].to(device)
    swapped = torch.randn(20, 4, 3, 16).to(device).transpose(1, 2)
    backwards = torch.randn(16, 3, 4, 20).to(device).permute(3, 1, 2, 0)
    for qkv in (strided, swapped, backwards):
        out = attention(qkv, cu_seqlens, 100, softmax_scale=0.5, impl=impl)
        truth = reference.attention(qkv, cu_seqlens, softmax_scale=0.5)
        torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-6)


def test_no_tokens_nan_in_another_sequence_and_huge_scores(triton_target):
    device, impl = triton_target.device, triton_target.impl
    empty = torch.zeros(0, 3, 2, 16, device=device, requires_grad=True)
    out = attention(empty, offsets_of(()).to(device), 0, impl=impl)
    out.sum().backward()
    assert out.shape == (0, 2, 16) and empty.grad.shape == empty.shape
    qkv = torch.randn(9, 3, 2, 16, device=device)
    qkv[4, 1, 0] = float("nan")  # a key of the second sequence's first head
    out = attention(qkv, offsets_of((3, 3, 3)).to(device), 3, impl=impl)
    assert out[3:6, 0].isnan().all()
    assert out[3:6, 1].isfinite().all() and out[[0, 1, 2, 6, 7, 8]].isfinite().all()
    huge = 100 * torch.randn(40, 3, 2, 32, device=device)
    out = attention(huge, offsets_of((40,)).to(device), 40, impl=impl)
    torch.testing.assert_close(out, plain(huge, (40,)), rtol=1e-3, atol=1e-3)
