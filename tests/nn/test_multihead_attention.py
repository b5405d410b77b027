import pytest
import torch

from fastenc.nn import MultiheadAttention
from fastenc.nn.pooling import pool
from fastenc.packing import pack
from tests.helpers.extension import needs_cpp


def pair(**options):
    """The module and torch's, with the same weights."""
    theirs = torch.nn.MultiheadAttention(32, 2, **options)
    ours = MultiheadAttention(32, 2, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@needs_cpp
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_self_attention_agrees_with_torchs_at_every_real_token(batch_first, bias):
    ours, theirs = pair(batch_first=batch_first, bias=bias)
    x = torch.randn(3, 11, 32)
    padding = torch.arange(11) >= torch.tensor([11, 4, 7])[:, None]
    real = ~padding
    shape = lambda v: v if batch_first else v.transpose(0, 1)
    for mask in (None, padding):
        gradients = []
        for module in (ours, theirs):
            own = x.clone().requires_grad_()
            y, weights = module(*[shape(own)] * 3, key_padding_mask=mask, need_weights=False)
            assert weights is None
            y = shape(y)
            (y[real] if mask is not None else y).square().sum().backward()
            gradients.append((y, own.grad, *(p.grad.clone() for p in module.parameters())))
            module.zero_grad()
        (a, *a_grads), (b, *b_grads) = gradients
        keep = real if mask is not None else torch.ones_like(real)
        torch.testing.assert_close(a[keep], b[keep], rtol=1e-5, atol=1e-5)
        assert mask is None or not a[padding].any()
        for ours_grad, theirs_grad in zip(a_grads, b_grads, strict=True):
            torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-4, atol=1e-4)


def test_every_other_call_is_torchs_own():
    ours, theirs = pair(batch_first=True)
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for arguments, options in (
        ((x, x, x), {}),
        ((x, memory, memory), dict(need_weights=False)),
        ((x, x, x), dict(need_weights=False, attn_mask=causal)),
        ((x[0], x[0], x[0]), dict(need_weights=False)),
    ):
        for a, b in zip(ours(*arguments, **options), theirs(*arguments, **options), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert torch.equal(a, b)


@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_pooling_agrees_with_the_padded_computation(pooling, dtype):
    lengths = [5, 1, 9]
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    padded = torch.randn(3, 9, 8, dtype=torch.float64)
    batch = pack(mask, mask)
    hidden = padded.flatten(0, 1)[batch.indices].to(dtype).requires_grad_()
    result = pool(hidden, batch.cu_seqlens, pooling)
    assert result.dtype == dtype
    parts = hidden.detach().double().split(lengths)
    expected = {"cls": lambda p: p[0], "mean": lambda p: p.mean(0), "max": lambda p: p.amax(0)}[
        pooling
    ]
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        result.double(), torch.stack([expected(p) for p in parts]), rtol=0, atol=tolerance
    )
    (gradient,) = torch.autograd.grad(result.sum(), hidden)
    assert gradient.isfinite().all() and gradient.any()


def test_pooling_names_bad_input():
    hidden = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"pooling must be one of .*got 'sum'"):
        pool(hidden, torch.tensor([0, 3], dtype=torch.int32), "sum")
    with pytest.raises(
        ValueError, match=r"an empty sequence has nothing to pool, got one at index 1"
    ):
        pool(hidden, torch.tensor([0, 3, 3], dtype=torch.int32), "mean")
