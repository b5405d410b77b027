"""Inputs and the plain computation, and the checks that CPU and GPU tests share."""

import torch
import torch.nn.functional as F

from fastenc.ops import linear_segment_max
from fastenc.testing import assert_within_budget
from tests.helpers.resident_memory import bytes_at_peak
from tests.helpers.segment_pool import offsets


def inputs_of(lengths, width, vocabulary, dtype=torch.float32, device="cpu", bias=True):
    new = lambda *shape: torch.randn(*shape, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).to(dtype)
    given = new(sum(lengths), width), weight.requires_grad_(), new(vocabulary)
    return given if bias else (*given[:2], None)


def plain(hidden, weight, bias, lengths):
    """A loop over the sequences, in float32 or wider: in bfloat16 many logits would be equal."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = F.linear(hidden.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    rows = [x.max(0).values if len(x) else x.sum(0) for x in logits.split(lengths)]
    return torch.stack(rows).to(hidden.dtype)


def check_against_plain(lengths, width, vocabulary, dtype, impl, device="cpu", bias=True):
    inputs = inputs_of(lengths, width, vocabulary, dtype, device, bias)
    wide = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    values, argmax = linear_segment_max(*inputs, offsets(lengths, device), impl=impl)
    theirs, exact = plain(*inputs, lengths), plain(*wide, lengths)
    assert_within_budget(values, theirs, exact, f"{dtype} values")
    empty = torch.tensor(lengths, device=device) == 0
    assert torch.equal(argmax < 0, empty[:, None].expand_as(argmax))
    leaves = [x for x in inputs if x is not None]
    dvalues = torch.randn_like(values).relu()  # zeros, as after a ReLU
    ours = torch.autograd.grad(values, leaves, dvalues)
    plains = torch.autograd.grad(theirs, leaves, dvalues)
    wides = [x for x in wide if x is not None]
    truths = torch.autograd.grad(exact, wides, dvalues.double())
    for name, *triple in zip(("hidden", "weight", "bias"), ours, plains, truths, strict=False):
        assert_within_budget(*triple, f"{dtype} gradient of {name}")


def check_memory(values_of):
    """Forward and backward of ``values_of``(hidden, weight, bias, cu_seqlens) never hold the outputs of all tokens."""
    lengths, vocabulary = [128] * 8, 30_522
    given, dvalues = inputs_of(lengths, 8, vocabulary), torch.rand(8, vocabulary)
    step = lambda f, end: torch.autograd.grad(f(*given, end), given, dvalues)
    step(values_of, offsets(lengths))  # allocates what later calls reuse
    logits = 4 * sum(lengths) * vocabulary
    assert bytes_at_peak(lambda: step(values_of, offsets(lengths))) < logits / 6
    # Several times, because the system may drop pages of libraries meanwhile.
    at_peak = (bytes_at_peak(lambda: step(plain, lengths)) for _ in range(3))
    assert any(each > logits for each in at_peak), "it would be noticed"


def check_ties_and_nan(impl, device="cpu"):
    """Of equal maxima the first token counts; NaN is the largest, the first one counts, and it stays in its place."""
    inf, nan = float("inf"), float("nan")
    hidden = torch.tensor([[1.0, 0], [3, 0], [3, 0], [0, 1], [nan, 1], [nan, 1], [2, 0]])
    weight = torch.tensor([[1.0, 0], [-1, 0], [0, 0]]).repeat(30, 1)
    bias = torch.tensor([0.0, 0, -inf]).repeat(30)
    given = [x.to(device).requires_grad_() for x in (hidden, weight, bias)]
    values, argmax = linear_segment_max(*given, offsets([3, 3, 0, 1], device), impl=impl)
    expected = [[3.0, -1.0, -inf], [nan] * 3, [0.0] * 3, [2.0, -2.0, -inf]]
    for row, wanted in zip(values.tolist(), expected, strict=True):
        torch.testing.assert_close(row, wanted * 30, equal_nan=True)
    assert argmax.tolist() == [[1, 0, 0] * 30, [4] * 90, [-1] * 90, [6] * 90]
    if impl == "reference":
        return  # its dense products multiply the NaN by gradients of 0
    dvalues = torch.zeros_like(values)
    dvalues[:, ::3] = torch.tensor([1.0, 0, 1, 1], device=device)[:, None]
    dhidden, dweight, dbias = torch.autograd.grad(values, given, dvalues)
    # A gradient of 0 takes nothing from the rows with NaN, and that of the empty sequence goes nowhere.
    assert dhidden[:, 0].tolist() == [0, 30, 0, 0, 0, 0, 30]
    assert dweight[::3].tolist() == [[5.0, 0]] * 30 and not dweight[1::3].any()
    assert dbias.tolist() == [2, 0, 0] * 30
