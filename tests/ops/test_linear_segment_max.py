import pytest
import torch

from fastenc.ops import flops, linear_segment_max  # noqa: F401  (counts FLOPs)
from tests.helpers.extension import needs_cpp
from tests.helpers.linear_segment_max import (
    check_against_plain,
    check_memory,
    check_ties_and_nan,
    inputs_of,
)
from tests.helpers.segment_pool import offsets

IMPLS = [pytest.param("cpp", marks=needs_cpp), "reference"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "lengths,width,vocabulary",
    # One row; vectors with a rest; sequences across the tiles of 512 and 128 rows, and one longer than a tile.
    [([1], 1, 1), ([5, 0, 33, 1], 37, 70), ([100, 0, 0, 500, 7], 130, 130), ([0, 700], 16, 9)],
)
def test_values_and_gradients_keep_the_budget(instruction_set, lengths, width, vocabulary, dtype):
    check_against_plain(lengths, width, vocabulary, dtype, "cpp", bias=vocabulary != 9)


def test_the_reference_is_the_plain_computation():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        check_against_plain([5, 0, 33], 7, 19, dtype, "reference")
    wide = [x.detach().double().requires_grad_() for x in inputs_of([4, 0, 5], 3, 6)]
    values_of = lambda *given: linear_segment_max(*given, offsets([4, 0, 5]))[0]
    assert torch.autograd.gradcheck(values_of, wide)


@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_ties_and_nan(instruction_set, impl):
    check_ties_and_nan(impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_reduce(impl):
    for lengths, vocabulary in (([], 5), ([0, 0], 5), ([2], 0)):
        given = inputs_of(lengths, 3, vocabulary)
        values, argmax = linear_segment_max(*given, offsets(lengths), impl=impl)
        assert values.shape == argmax.shape == (len(lengths), vocabulary) and not values.any()
        gradients = torch.autograd.grad(values.sum(), given)
        assert all(
            g.shape == x.shape and not g.any() for g, x in zip(gradients, given, strict=True)
        )


@needs_cpp
def test_results_do_not_depend_on_threads_strides_or_the_batch():
    for dtype in (torch.float32, torch.bfloat16):
        given = inputs_of([300, 20, 400], 48, 200, dtype)
        dvalues, before, results = torch.randn(3, 200).to(dtype), torch.get_num_threads(), []
        strided = tuple(x.detach().T.contiguous().T.requires_grad_() for x in given[:2])
        for threads, (hidden, weight) in ((1, given[:2]), (2, given[:2]), (1, strided)):
            torch.set_num_threads(threads)
            leaves = hidden, weight, given[2]
            values, argmax = linear_segment_max(*leaves, offsets([300, 20, 400]))
            results.append((values, argmax, *torch.autograd.grad(values, leaves, dvalues)))
        torch.set_num_threads(before)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
        alone, _ = linear_segment_max(given[0][300:320], *given[1:], offsets([20]))
        assert torch.equal(alone[0], results[0][0][1])


@needs_cpp
def test_the_outputs_of_all_tokens_are_never_in_memory():
    check_memory(lambda *given: linear_segment_max(*given, impl="cpp")[0])


def test_autocast_casts_and_flops_are_those_of_the_product():
    given = inputs_of([3, 4], 24, 70)
    with torch.autocast("cpu", torch.bfloat16):
        values, _ = linear_segment_max(*given, offsets([3, 4]))
    low = [x.detach().bfloat16() for x in given]
    assert torch.equal(values, linear_segment_max(*low, offsets([3, 4]))[0])
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(values.sum(), given))
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        linear_segment_max(*given, offsets([3, 4]))
    assert counter.get_total_flops() == 2 * 7 * 24 * 70


def test_bad_input_is_named():
    hidden, weight, bias = inputs_of([1, 3], 8, 5)
    cu_seqlens = offsets([1, 3])
    for arguments, message in (
        ((hidden[0], weight, bias, cu_seqlens), r"hidden must be floating point of shape \(total"),
        ((hidden, weight.T, bias, cu_seqlens), r"weight must have shape \(vocabulary, 8\), got"),
        ((hidden, weight, bias[1:], cu_seqlens), r"bias must have shape \(5,\), got \(4,\)"),
        ((hidden, weight.double(), bias, cu_seqlens), "weight must have hidden's dtype"),
        ((hidden, weight, bias, offsets([1, 2])), "must run from 0 to the number of tokens 4"),
        ((hidden, weight, bias, cu_seqlens.long()), "cu_seqlens must be int32"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_segment_max(*arguments)
    with pytest.raises(ValueError, match="impl='cpp' cannot take this call"):
        linear_segment_max(*(x.double() for x in (hidden, weight, bias)), cu_seqlens, impl="cpp")
