import pytest
import torch
import torch.nn.functional as F

from fastenc.ops import linear_segment_log_sum
from fastenc.testing import assert_within_budget
from tests.helpers.extension import needs_cpp
from tests.helpers.linear_segment_max import check_memory, inputs_of
from tests.helpers.resident_memory import bytes_at_peak
from tests.helpers.segment_pool import offsets

LENGTHS = [5, 0, 33]


IMPLS = ["reference", pytest.param("cpp", marks=needs_cpp)]


def plain(hidden, weight, bias, activation, lengths=LENGTHS):
    logits = F.linear(hidden, weight, bias)
    logarithms = logits.to(torch.promote_types(logits.dtype, torch.float32)).relu().log1p()
    logarithms = logarithms.log1p() if activation == "log1p_relu" else logarithms
    return torch.stack([x.sum(0) for x in logarithms.split(lengths)]).to(hidden.dtype)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_values_and_gradients_keep_the_budget(ours, dtype, activation, impl):
    """In blocks of 7 entries of the vocabulary, and in one."""
    inputs = inputs_of(LENGTHS, 16, 30, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    theirs, exact = plain(*inputs, activation), plain(*wide, activation)
    dvalues = torch.randn_like(theirs)
    plains = torch.autograd.grad(theirs, inputs, dvalues)
    truths = torch.autograd.grad(exact, wide, dvalues.double())
    for limit in (38 * 4 * 7, 2**20):
        options = {"activation": activation, "max_logits_bytes": limit, "impl": impl}
        values = linear_segment_log_sum(*inputs, offsets(LENGTHS), **options)
        assert_within_budget(values, theirs, exact, f"{dtype} values")
        gradients = torch.autograd.grad(values, inputs, dvalues)
        for name, *triple in zip(
            ("hidden", "weight", "bias"), gradients, plains, truths, strict=True
        ):
            assert_within_budget(*triple, f"{dtype} gradient of {name}")


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_sequence_of_several_tiles_of_rows_has_the_same_bits_in_any_batch(ours, dtype):
    lengths = [300, 700, 1, 90]
    hidden, weight, bias = (x.detach() for x in inputs_of(lengths, 32, 70, dtype))
    values = linear_segment_log_sum(hidden, weight, bias, offsets(lengths), impl="cpp")
    theirs = plain(hidden, weight, bias, "relu", lengths)
    exact = plain(hidden.double(), weight.double(), bias.double(), "relu", lengths)
    assert_within_budget(values, theirs, exact, f"{dtype} values")
    for rows, length, value in zip(hidden.split(lengths), lengths, values, strict=True):
        alone = linear_segment_log_sum(rows, weight, bias, offsets([length]), impl="cpp")
        assert torch.equal(alone[0], value)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_outputs_of_all_tokens_are_never_in_memory(impl):
    options = {"max_logits_bytes": 2**20, "impl": impl}
    check_memory(lambda *given: linear_segment_log_sum(*given, **options))


@needs_cpp
def test_one_block_of_the_backward_is_in_memory_at_a_time():
    given, limit = inputs_of([512], 8, 40_000), 2**25 + 2**20  # two blocks and a rest
    (sums,) = values = linear_segment_log_sum(*given, offsets([512]), max_logits_bytes=limit)
    backward = lambda: torch.autograd.grad(values, given, sums[None], retain_graph=True)
    backward()  # allocates what later calls reuse
    assert bytes_at_peak(backward) < 1.5 * limit


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_small_large_and_infinite_outputs(ours, activation, impl):
    outputs = torch.tensor([1e-30, 1e-9, 3e-4, 0.41, 0.42, 1.0, 1e3, 1e30, -1.0, torch.inf])
    hidden, weight = torch.ones(1, 1), outputs[:, None].clone().requires_grad_()
    values = linear_segment_log_sum(
        hidden, weight, None, offsets([1]), activation=activation, impl=impl
    )
    wide = outputs.double().requires_grad_()
    exact = wide.relu().log1p()
    exact = exact.log1p() if activation == "log1p_relu" else exact
    torch.testing.assert_close(values[0], exact.float(), rtol=3e-7, atol=0)
    (gradient,) = torch.autograd.grad(values.sum(), weight)
    (truth,) = torch.autograd.grad(exact.sum(), wide)
    torch.testing.assert_close(gradient[:, 0], truth.float(), rtol=5e-7, atol=0)


@needs_cpp
def test_the_ops_pass_opcheck():
    hidden, weight, bias = (x.detach() for x in inputs_of(LENGTHS, 16, 30))
    ops = torch.ops.fastenc
    given = (hidden, weight, bias, offsets(LENGTHS), True)
    torch.library.opcheck(ops.linear_segment_log_sum_fwd.default, given)
    given = (torch.randn(38, 30), torch.randn(3, 30), offsets(LENGTHS), True)
    torch.library.opcheck(ops.linear_segment_log_sum_gradient_.default, given)


@pytest.mark.parametrize("impl", IMPLS)
def test_nan_stays_in_its_sequence(ours, impl):
    hidden, weight, bias = (x.detach() for x in inputs_of(LENGTHS, 16, 30))
    hidden[2] = torch.nan
    hidden.requires_grad_()
    values = linear_segment_log_sum(hidden, weight, bias, offsets(LENGTHS), impl=impl)
    assert values[0].isnan().all() and values[1:].isfinite().all()
    (gradient,) = torch.autograd.grad(values.sum(), hidden)
    assert gradient[2].isnan().all() and gradient[5:].isfinite().all()


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
