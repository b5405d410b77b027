import pytest
import torch
import torch.nn.functional as F

from fastenc.ops import linear_segment_log_sum
from fastenc.testing import assert_within_budget
from tests.helpers.linear_segment_max import inputs_of
from tests.helpers.segment_pool import offsets

LENGTHS = [5, 0, 33]


def plain(hidden, weight, bias, activation):
    logits = F.linear(hidden, weight, bias)
    logarithms = logits.to(torch.promote_types(logits.dtype, torch.float32)).relu().log1p()
    logarithms = logarithms.log1p() if activation == "log1p_relu" else logarithms
    return torch.stack([x.sum(0) for x in logarithms.split(LENGTHS)]).to(hidden.dtype)


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_values_and_gradients_keep_the_budget(ours, dtype, activation):
    """In blocks of 7 entries of the vocabulary, and in one."""
    inputs = inputs_of(LENGTHS, 16, 30, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    theirs, exact = plain(*inputs, activation), plain(*wide, activation)
    dvalues = torch.randn_like(theirs)
    plains = torch.autograd.grad(theirs, inputs, dvalues)
    truths = torch.autograd.grad(exact, wide, dvalues.double())
    for limit in (38 * 4 * 7, 2**20):
        options = {"activation": activation, "max_logits_bytes": limit}
        values = linear_segment_log_sum(*inputs, offsets(LENGTHS), **options)
        assert_within_budget(values, theirs, exact, f"{dtype} values")
        gradients = torch.autograd.grad(values, inputs, dvalues)
        for name, *triple in zip(
            ("hidden", "weight", "bias"), gradients, plains, truths, strict=True
        ):
            assert_within_budget(*triple, f"{dtype} gradient of {name}")


def test_gradients_without_a_bias_nan_and_errors():
    hidden, weight, _ = (x.detach().double() for x in inputs_of(LENGTHS, 3, 6))
    sums = lambda *given: linear_segment_log_sum(*given, None, offsets(LENGTHS))
    assert torch.autograd.gradcheck(sums, (hidden.requires_grad_(), weight.requires_grad_()))
    with torch.no_grad():
        hidden[2] = torch.nan
    values = sums(hidden, weight)
    assert values[0].isnan().all() and not values[1].any() and values[2].isfinite().all()
    with pytest.raises(ValueError, match="max_logits_bytes must be positive, got 0"):
        linear_segment_log_sum(hidden, weight, None, offsets(LENGTHS), max_logits_bytes=0)
    with pytest.raises(ValueError, match=r"activation must be one of .*, got 'gelu'"):
        linear_segment_log_sum(hidden, weight, None, offsets(LENGTHS), activation="gelu")
    with pytest.raises(ValueError, match=r"linear_segment_log_sum: bias must have shape \(6,\)"):
        linear_segment_log_sum(hidden, weight, weight[0], offsets(LENGTHS))
