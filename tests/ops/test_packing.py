from dataclasses import replace

import pytest
import torch

from fastenc import ops, packing
from fastenc.packing import PackedBatch, length_sorted_batches, pack_sequences
from tests.helpers.compiled import compiled_once
from tests.helpers.extension import needs_cpp
from tests.helpers.packing import batch_of, check_both_ways


@pytest.mark.parametrize("impl", [pytest.param("cpp", marks=needs_cpp), "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_both_ways_with_gradients(impl, dtype):
    for lengths, length, shape in (
        ([5, 1, 9], 9, (8,)),
        ([0, 3, 0], 4, (2, 5)),
        ([2, 1], 2, ()),
        ([4, 4], 4, (3,)),
        ([0, 0], 3, (6,)),
        ([], 0, (6,)),
        ([700, 1, 900], 1000, (40,)),  # more than one thread's share
    ):
        check_both_ways(lengths, length, shape, dtype, impl)


@pytest.mark.parametrize("impl", [pytest.param("cpp", marks=needs_cpp), "reference"])
def test_padding_anywhere_and_batches_packed_from_lists(impl):
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]])
    batch = packing.pack(mask, mask)
    values = torch.randn(5, 3)
    expected = torch.zeros(3, 4, 3).index_put((mask.bool(),), values)
    assert torch.equal(ops.unpack(values, batch, impl=impl), expected)
    assert torch.equal(ops.pack(expected, batch, impl=impl), values)
    batch = pack_sequences([[7, 8], [], [9, 9, 9]])
    expected = torch.zeros(3, 3, 3)
    expected[0, :2], expected[2] = values[:2], values[2:]
    assert torch.equal(ops.unpack(values, batch, impl=impl), expected)
    assert torch.equal(ops.pack(expected, batch, impl=impl), values)


@pytest.mark.parametrize("impl", [pytest.param("cpp", marks=needs_cpp), "reference"])
def test_other_values_in_the_padding(impl):
    batch, mask = batch_of([2, 0, 3], 3)
    for dtype, value in ((torch.float32, -100.0), (torch.bfloat16, float("-inf"))):
        values = torch.randn(5, 4).to(dtype).requires_grad_()
        y = ops.unpack(values, batch, value, impl=impl)
        assert torch.equal(y[mask], values) and y[~mask].eq(value).all()
        (gradient,) = torch.autograd.grad(y[mask].sum(), values)
        assert gradient.eq(1).all()
    labels = ops.unpack(torch.arange(5), batch, padding_value=-100)
    assert labels[1].eq(-100).all() and labels.dtype == torch.int64


def test_integers_and_halves_take_the_reference():
    batch, mask = batch_of([2, 3], 3)
    for dtype in (torch.int64, torch.bool, torch.float16, torch.float64):
        padded = torch.randn(2, 3, 4).mul(3).to(dtype) * mask.unsqueeze(2).to(dtype)
        assert torch.equal(ops.unpack(ops.pack(padded, batch), batch), padded)


@pytest.mark.parametrize("impl", [pytest.param("cpp", marks=needs_cpp), "reference"])
def test_second_derivatives(impl):
    batch, _ = batch_of([2, 3], 3)
    x = torch.randn(2, 3, 4, requires_grad=True)
    y = ops.unpack(ops.pack(x, batch, impl=impl) ** 3, batch, impl=impl)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    mask = ops.unpack(torch.ones(5, 1), batch)
    torch.testing.assert_close(first, 3 * x**2 * mask)
    torch.testing.assert_close(second, 6 * x * mask)


@needs_cpp
def test_registration_passes_opcheck():
    arguments = (torch.randn(3, 5), torch.tensor([0, 2, 3]), 6, -100.0)
    torch.library.opcheck(torch.ops.fastenc.unpack.default, arguments)


@pytest.mark.parametrize("impl", [pytest.param("cpp", marks=needs_cpp), "reference"])
def test_torch_compile_full_graph_and_dynamic_shapes(impl):
    def through_padding(x, batch):
        return ops.unpack(ops.pack(x, batch, impl=impl).square(), batch, impl=impl)

    compiled = compiled_once(through_padding)
    for lengths, length in (([3, 4], 5), ([5, 1, 6], 8)):
        batch, mask = batch_of(lengths, length)
        x = torch.randn(len(lengths), length, 4, requires_grad=True)
        y = compiled(x, batch)
        assert torch.equal(y, x.square() * mask.unsqueeze(2))
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(dx, 2 * x * mask.unsqueeze(2))


def test_bad_input_is_named():
    batch, _ = batch_of([2, 3], 3)
    with pytest.raises(ValueError, match=r"x must have the batch's padded shape \(2, 3\) in front"):
        ops.pack(torch.ones(3, 2, 4), batch)
    with pytest.raises(ValueError, match="one row for each of the batch's 5 tokens, got shape"):
        ops.unpack(torch.ones(4, 8), batch)
    with pytest.raises(ValueError, match="cannot take this call: it takes float32 or bfloat16"):
        ops.unpack(torch.ones(5, 8, dtype=torch.int64), batch, impl="cpp")


def fields(**changes):
    """The fields of a batch of two sequences, with 2 and 3 tokens in 2 x 3 places."""
    batch, _ = batch_of([2, 3], 3)
    return {**vars(batch), **changes}


@pytest.mark.parametrize(
    "indices",
    [
        [0, 1, 1, 2, 3],
        [1, 0, 3, 4, 5],
        [0, 1, 2, 3, 6],
        [-1, 0, 3, 4, 5],
        [0, 3, 4, 5, 5],
        [0, 1, 2, 3, 4],  # a token of the second sequence in the first row
    ],
)
def test_indices_lie_in_their_sequences_rows(indices):
    with pytest.raises(
        ValueError, match=r"indices must ascend, .* row of the padded shape \(2, 3\), got \["
    ):
        PackedBatch(**fields(indices=torch.tensor(indices)))


def test_a_batch_whose_fields_disagree_is_named():
    numbers = torch.arange(5)
    for changes, message in (
        (dict(input_ids=numbers.int()), r"input_ids must be int64 of shape \(total_tokens,\), got"),
        (dict(input_ids=numbers[None]), r"input_ids must be int64 .* of shape \(1, 5\)"),
        (dict(input_ids=numbers[:4]), r"position_ids must be int64 of shape \(4,\), got"),
        (dict(position_ids=numbers[:4]), r"position_ids must be int64 of shape \(5,\), got"),
        (dict(token_type_ids=torch.zeros(5)), "token_type_ids must be int64 .* got torch.float32"),
        # Long enough to read far beyond the tokens.
        (
            dict(indices=torch.arange(7000), padded_shape=(2, 3500)),
            r"indices must be int64 of shape \(5,\), got torch.int64 of shape \(7000,\)",
        ),
        (dict(indices=None), "indices and padded_shape go together, got padded_shape only"),
        (dict(padded_shape=None), "indices and padded_shape go together, got indices only"),
        (dict(padded_shape=(3, 3)), r"padded_shape must be \(2, length\), .* got \(3, 3\)"),
        (dict(cu_seqlens=torch.tensor([0, 5])), "cu_seqlens must be int32"),
        (dict(cu_seqlens=torch.tensor([0, 2, 4]).int()), "must run from 0 to .* 5, got 0 to 4"),
        (dict(max_seqlen=2), "max_seqlen must be at least the longest sequence, got 2"),
        (dict(max_seqlen=-1), "max_seqlen must be at least 0, got -1"),
        (dict(hidden=torch.ones(4, 8)), r"hidden must have one row .* got shape \(4, 8\)"),
        (
            dict(hidden=torch.ones(5, 8, device="meta")),
            "hidden must be on the device of input_ids cpu, got meta: move the batch as a whole",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            PackedBatch(**fields(**changes))


@needs_cpp
def test_the_kernel_takes_no_more_indices_than_rows():
    with pytest.raises(RuntimeError, match="one for each row of values"):
        torch.ops.fastenc.unpack(torch.ones(2, 4), torch.arange(7000), 8000, 0.0)


def test_positions_that_start_elsewhere_move_no_row():
    batch = pack_sequences([[7, 8], [9, 9, 9]])
    moved = replace(batch, position_ids=batch.position_ids + 1000)
    values = torch.randn(5, 3)
    assert torch.equal(ops.unpack(values, moved), ops.unpack(values, batch))


def test_length_sorted_batches_hold_every_sequence_once():
    lengths = [3, 9, 1, 9, 4]
    batches = length_sorted_batches(lengths, 2)
    assert [len(chosen) for chosen in batches] == [2, 2, 1]
    assert sorted(index for chosen in batches for index in chosen) == [0, 1, 2, 3, 4]
    assert [lengths[index] for chosen in batches for index in chosen] == [9, 9, 4, 3, 1]
    assert length_sorted_batches([], 2) == []
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"batch_size must be at least 1, got {size}"):
            length_sorted_batches(lengths, size)
