"""The CUDA source run thread by thread on the CPU, through the public ops: tests indices, barriers and reductions."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from fastenc.ops import dispatch, linear_masked_cross_entropy, masked_cross_entropy
from fastenc.testing import assert_within_budget
from tests.helpers import cuda_emulation
from tests.helpers.cross_entropy import (
    check_ignored_rows_are_never_read,
    check_loss_and_gradient,
    labels_for,
)
from tests.helpers.extension import needs_cpp

pytestmark = needs_cpp
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return cuda_emulation.build(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def emulated(library, monkeypatch):
    """The public ops on the emulated kernels of a GPU with clusters; a call chooses another architecture."""
    library.emulate_architecture(90)
    monkeypatch.setattr(dispatch, "CPP_DTYPES", (torch.float32, torch.float16, torch.bfloat16))
    with cuda_emulation.in_place_of_cpp():
        yield library.emulate_architecture


def logits_for(rows, vocabulary, dtype):
    return (3 * torch.randn(rows, vocabulary)).to(dtype)


@DTYPES
@pytest.mark.parametrize(
    "reduction,label_smoothing,z_loss", [("mean", 0, 0), ("sum", 0.1, 0), ("none", 0.1, 1e-3)]
)
@pytest.mark.parametrize("rows,vocabulary", [(1, 1), (2, 7), (9, 37), (7, 2048), (7, 5003)])
def test_loss_and_gradient_keep_the_budget(
    emulated, rows, vocabulary, reduction, label_smoothing, z_loss, dtype
):
    labels = labels_for(rows, vocabulary)
    labels[-1] = vocabulary - 1
    options = dict(label_smoothing=label_smoothing, z_loss=z_loss, reduction=reduction)
    check_loss_and_gradient(logits_for(rows, vocabulary, dtype), labels, "cpp", **options)


def test_columns_of_minus_infinity_count_nothing(emulated):
    """Most of a row may be -infinity: whole vectors, and all that a thread reads."""
    logits = logits_for(5, 5003, torch.float32)
    logits[:, 16:] = float("-inf")
    labels = torch.tensor([0, 15, 3, -100, 7])
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, expected = masked_cross_entropy(ours, labels), F.cross_entropy(theirs, labels)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


# BERT's vocabulary; the most that one block holds, plus one vector; XLM-R's; more than a cluster of eight holds.
# Without clusters, one block reads the long rows in tiles.
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    "vocabulary,dtype",
    [
        (30522, torch.float16),
        (30522, torch.bfloat16),
        (32768, torch.float32),
        (32776, torch.bfloat16),
        (131071, torch.float32),
        (250002, torch.bfloat16),
        (300001, torch.float32),
    ],
)
def test_large_vocabularies(emulated, architecture, vocabulary, dtype):
    emulated(architecture)
    labels = torch.tensor([0, -100, vocabulary - 1])
    options = dict(label_smoothing=0.1, z_loss=1e-3, reduction="sum")
    check_loss_and_gradient(logits_for(3, vocabulary, dtype), labels, "cpp", **options)


@pytest.mark.parametrize(
    "architecture,vocabulary,threads", [(90, 30522, 512), (90, 131071, 512), (80, 30522, 1024)]
)
def test_float32_rows_leave_room_for_a_second_block(
    library, emulated, architecture, vocabulary, threads
):
    """1,024 threads with 64 registers use all registers of a multiprocessor."""
    emulated(architecture)
    masked_cross_entropy(logits_for(1, vocabulary, torch.float32), torch.tensor([0]))
    assert threads // 2 < library.threads_of_last_launch() <= threads


@DTYPES
@pytest.mark.parametrize("width", [3, 130, 2051])
def test_every_alignment_in_place_and_nothing_beyond_the_rows(emulated, width, dtype):
    """Rows inside a buffer of infinities. None of these may be read, and each must still be there afterwards."""
    for offset in range(9):
        for gap in (0, 5, 8):
            buffer = torch.full((offset + 3 * (width + gap) + 9,), float("inf"), dtype=dtype)
            rows = buffer[offset : offset + 3 * (width + gap)].view(3, width + gap)[:, :width]
            logits = logits_for(3, width, dtype)
            rows.copy_(logits)
            labels = torch.tensor([width - 1, -100, offset % width])
            losses = torch.ops.fastenc.masked_cross_entropy_(rows, labels, -100, 0.1, 0, None)
            wide = logits.double().requires_grad_()
            exact = F.cross_entropy(wide, labels, reduction="none", label_smoothing=0.1)
            (gradient,) = torch.autograd.grad(exact.sum(), wide)
            torch.testing.assert_close(losses.double(), exact.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(rows, gradient.to(dtype), rtol=2e-2, atol=1e-5)
            rows.fill_(float("inf"))
            assert (buffer == float("inf")).all()


@DTYPES
def test_logits_that_begin_between_vectors(emulated, dtype):
    logits = torch.randn(1 + 4 * 999).to(dtype)[1:].view(4, 999)
    labels = torch.tensor([5, -100, 0, 998])
    options = dict(label_smoothing=0.0, z_loss=0.0, reduction="mean")
    check_loss_and_gradient(logits, labels, "cpp", **options)
    with torch.no_grad():
        ours = masked_cross_entropy(logits, labels)
    torch.testing.assert_close(ours, F.cross_entropy(logits.float(), labels))


def test_ignored_rows_are_never_read(emulated):
    check_ignored_rows_are_never_read(torch.tensor([3, -100, 5, -100, 99, 0]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_labelled_is_a_loss_of_zero(emulated, reduction):
    for rows in (0, 3):
        logits = torch.randn(rows, 11, requires_grad=True)
        loss = masked_cross_entropy(logits, torch.full((rows,), -100), reduction=reduction)
        assert torch.equal(loss, torch.zeros(rows if reduction == "none" else ()))
        loss.sum().backward()
        assert torch.equal(logits.grad, torch.zeros(rows, 11))


@pytest.mark.parametrize("value", [1e4, -1e4])
@pytest.mark.parametrize("vocabulary", [3000, 70000])
def test_large_infinite_and_nan_logits(emulated, vocabulary, value):
    logits = torch.randn(4, vocabulary)
    logits[0, 7] = value
    logits[1, : vocabulary - 900] = -float("inf")  # whole warps and blocks
    logits[2, :] = value
    logits[3, 1234] = float("nan")
    labels = torch.tensor([7, vocabulary - 100, 0, 1])
    logits.requires_grad_()
    losses = masked_cross_entropy(logits, labels, reduction="none")
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    ours, theirs = (torch.autograd.grad(v.sum(), logits)[0][:3] for v in (losses, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("label", [-1, -2000, 50, 2**40])
def test_a_label_outside_the_vocabulary_gives_nan_and_touches_no_other_row(emulated, label):
    buffer = torch.full((5, 50), float("inf"))
    buffer[1:4] = torch.randn(3, 50)
    logits = buffer[1:4].clone()
    labels = torch.tensor([4, label, 49])
    losses = torch.ops.fastenc.masked_cross_entropy_(buffer[1:4], labels, -100, 0.1, 0, None)
    assert losses.isnan().tolist() == [False, True, False]
    assert buffer[2].isnan().all() and buffer[[0, 4]].isinf().all()
    wide = logits[[0, 2]].requires_grad_()
    F.cross_entropy(wide, labels[[0, 2]], reduction="sum", label_smoothing=0.1).backward()
    torch.testing.assert_close(buffer[[1, 3]], wide.grad)


@DTYPES
def test_backward_twice_and_scaled_losses(emulated, dtype):
    logits, labels = torch.randn(6, 301).to(dtype), labels_for(6, 301, 0.7)
    ours, theirs = logits.clone().requires_grad_(), logits.float().requires_grad_()
    loss = masked_cross_entropy(ours, labels)
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    (4 * F.cross_entropy(theirs, labels)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad.to(dtype))


def test_factors_of_one_and_ignored_rows_are_left_alone(emulated):
    x = torch.full((4, 37), float("nan"))
    x[2] = 1.5
    labels, factors = torch.tensor([0, -100, 3, 1]), torch.tensor([1.0, 2.0, 3.0, 1.0])
    torch.ops.fastenc.scale_labelled_rows_(x, labels, -100, factors)
    assert x[[0, 1, 3]].isnan().all() and (x[2] == 4.5).all()


@DTYPES
@pytest.mark.parametrize("max_logits_bytes", [2**31, 3000])
def test_linear_form_on_padded_columns(emulated, monkeypatch, max_logits_bytes, dtype):
    linear = importlib.import_module("fastenc.ops.linear_masked_cross_entropy")
    monkeypatch.setitem(linear.COLUMN_MULTIPLE, "cpu", 64)
    monkeypatch.setitem(linear.BIAS_COLUMNS, "cpu", 8)
    labels = labels_for(40, 301)
    tensors = [
        torch.randn(shape).to(dtype).requires_grad_() for shape in ((40, 24), (301, 24), (301,))
    ]
    number = int((labels != -100).sum()) + 3
    loss = linear_masked_cross_entropy(
        *tensors, labels, max_labels=number, max_logits_bytes=max_logits_bytes
    )
    plain = F.cross_entropy(F.linear(*tensors), labels)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    truth = F.cross_entropy(F.linear(*wide), labels)
    ours, theirs, exact = (
        torch.autograd.grad(value, inputs)
        for value, inputs in ((loss, tensors), (plain, tensors), (truth, wide))
    )
    for name, *triple in zip(("dhidden", "dweight", "dbias"), ours, theirs, exact, strict=True):
        assert_within_budget(*triple, name)


def test_more_labelled_rows_than_announced_give_nan_where_nothing_is_read_back(
    emulated, monkeypatch
):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    labels = torch.tensor([1, -100, 2, 5, -100, 9])
    loss = linear_masked_cross_entropy(hidden, weight, None, labels, max_labels=3)
    loss.backward()
    assert loss.isnan() and weight.grad.isnan().all() and hidden.grad[[0, 2, 3]].isnan().all()


def test_unsupported_input_is_an_error(emulated):
    ops, labels = torch.ops.fastenc, torch.tensor([0, 1])
    for logits, given, message in (
        (torch.randn(2, 5, dtype=torch.float64), labels, "float32, float16 or bfloat16"),
        (torch.randn(5, 2).T, labels, "each row of the logits must be contiguous"),
        (torch.randn(2, 5), labels.int(), "labels must be int64, one a row"),
        (torch.randn(2, 5), labels[:1], "labels must be int64, one a row"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.masked_cross_entropy_(logits, given, -100, 0.0, 0.0, None)
