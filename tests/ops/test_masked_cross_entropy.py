import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fastenc import nn as fnn
from fastenc.ops import linear_masked_cross_entropy, masked_cross_entropy
from fastenc.ops.labelled import select_labelled
from fastenc.reference import masked_cross_entropy as reference
from fastenc.testing import assert_within_budget
from tests.helpers.compiled import compiled_once
from tests.helpers.cross_entropy import (
    check_ignored_rows_are_never_read,
    check_loss_and_gradient,
    labels_for,
    plain_loss,
)
from tests.helpers.extension import needs_cpp
from tests.helpers.products import widening_products_on_cpu

linear_module = importlib.import_module("fastenc.ops.linear_masked_cross_entropy")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing,z_loss", [(0.0, 0.0), (0.1, 1e-3)])
@pytest.mark.parametrize("rows,vocabulary", [(1, 1), (9, 37), (40, 2048), (33, 5003)])
def test_loss_and_gradient_keep_the_budget(
    instruction_set, rows, vocabulary, label_smoothing, z_loss, reduction, dtype
):
    logits = (3 * torch.randn(rows, vocabulary)).to(dtype)
    labels = labels_for(rows, vocabulary)
    labels[-1] = vocabulary - 1
    options = dict(label_smoothing=label_smoothing, z_loss=z_loss, reduction=reduction)
    check_loss_and_gradient(logits, labels, "cpp", **options)


@needs_cpp
def test_ignored_rows_are_never_read():
    check_ignored_rows_are_never_read(torch.tensor([3, -100, 5, -100, -100, 99, -100, 0]))


@pytest.mark.parametrize("impl", ["reference", pytest.param("cpp", marks=needs_cpp)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_labelled_is_a_loss_of_zero(impl, reduction, rows):
    logits = torch.randn(rows, 11, requires_grad=True)
    labels = torch.full((rows,), -100)
    loss = masked_cross_entropy(logits, labels, reduction=reduction, impl=impl)
    assert torch.equal(loss, torch.zeros(rows if reduction == "none" else ()))
    loss.sum().backward()
    assert torch.equal(logits.grad, torch.zeros(rows, 11))


@pytest.mark.parametrize("value", [1e4, -1e4])
def test_large_and_infinite_logits(instruction_set, value):
    logits = torch.randn(3, 3000)
    logits[0, 7] = value
    logits[1, :2100] = -float("inf")  # a whole block of columns
    logits[2, :] = value
    labels = torch.tensor([7, 2500, 0])
    logits.requires_grad_()
    losses = masked_cross_entropy(logits, labels, reduction="none")
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(v.sum(), logits)[0] for v in (losses, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_nan_in_a_labelled_row_is_not_hidden(instruction_set):
    logits = torch.zeros(2, 50)
    logits[0, 20] = float("nan")
    losses = masked_cross_entropy(logits, torch.tensor([1, 1]), reduction="none")
    assert losses[0].isnan() and losses[1].isfinite()


@needs_cpp
def test_backward_twice_and_scaled_losses():
    logits, labels = torch.randn(6, 300), labels_for(6, 300, 0.7)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = masked_cross_entropy(ours, labels)
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    (4 * F.cross_entropy(theirs, labels)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@needs_cpp
def test_the_gradient_does_not_depend_on_the_number_of_threads():
    logits, labels = torch.randn(64, 3001), labels_for(64, 3001)
    results = []
    threads = torch.get_num_threads()
    for number in (1, 2):
        torch.set_num_threads(number)
        x = logits.clone().requires_grad_()
        loss = masked_cross_entropy(x, labels)
        loss.backward()
        results.append((loss.detach(), x.grad))
    torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@needs_cpp
def test_registration_passes_opcheck():
    logits, labels = torch.randn(5, 40), torch.tensor([1, -100, 3, 39, -100])
    ops = torch.ops.fastenc
    for wants, divisor in ((False, None), (True, torch.tensor(3))):
        torch.library.opcheck(
            ops.masked_cross_entropy_fwd.default, (logits, labels, -100, 0.1, 0.0, divisor, wants)
        )
    torch.library.opcheck(ops.masked_cross_entropy_.default, (logits, labels, -100, 0.0, 0.0, None))
    torch.library.opcheck(
        ops.scale_labelled_rows_.default, (logits, labels, -100, torch.tensor([2.0]))
    )


@needs_cpp
def test_torch_compile_full_graph_and_dynamic_shapes():
    compiled = compiled_once(masked_cross_entropy)
    for rows in (4, 9):
        logits, labels = torch.randn(rows, 50, requires_grad=True), labels_for(rows, 50, 0.8)
        labels[0] = 3
        (ours,) = torch.autograd.grad(compiled(logits, labels), logits)
        (theirs,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits)
        torch.testing.assert_close(ours, theirs)


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("max_logits_bytes", [2**31, 3000])
@pytest.mark.parametrize("form", ["as on a CPU", "as on a GPU", "with rows to spare"])
def test_linear_loss_and_gradients_keep_the_budget(
    dtype, reduction, max_logits_bytes, form, monkeypatch
):
    tokens, width, vocabulary = 70, 24, 301
    labels = labels_for(tokens, vocabulary)
    tensors = [
        (torch.randn(shape) * scale).to(dtype).requires_grad_()
        for shape, scale in (((tokens, width), 1), ((vocabulary, width), 0.3), ((vocabulary,), 1))
    ]
    options = dict(label_smoothing=0.1, z_loss=1e-3, reduction=reduction)
    form_options = {}
    if form != "as on a CPU":
        monkeypatch.setitem(linear_module.COLUMN_MULTIPLE, "cpu", 64)
        monkeypatch.setitem(linear_module.BIAS_COLUMNS, "cpu", 8)
        spare = 13 if form == "with rows to spare" else 0
        form_options = dict(max_labels=int((labels != -100).sum()) + spare)
    loss = linear_masked_cross_entropy(
        *tensors, labels, max_logits_bytes=max_logits_bytes, **form_options, **options
    )
    with torch.no_grad():
        without = linear_masked_cross_entropy(*tensors, labels, **form_options, **options)
    torch.testing.assert_close(without, loss.detach())
    plainest = linear_masked_cross_entropy(
        *tensors, labels, impl="reference", **form_options, **options
    )
    torch.testing.assert_close(plainest, loss, rtol=1e-3, atol=1e-3)
    plain = plain_loss(F.linear(*tensors), labels, **options)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    truth = reference.linear_masked_cross_entropy(*wide, labels, **options)
    if dtype == torch.float32:
        assert_within_budget(loss, plain, truth, "loss")
    upstream = torch.randn_like(loss)
    ours = torch.autograd.grad(loss, tensors, upstream)
    theirs = torch.autograd.grad(plain, tensors, upstream.to(plain.dtype))
    exact = torch.autograd.grad(truth, wide, upstream.double())
    for name, *triple in zip(("dhidden", "dweight", "dbias"), ours, theirs, exact, strict=True):
        assert_within_budget(*triple, name)


@pytest.mark.parametrize("appended", [0, 8], ids=["as on a CPU", "as on a GPU"])
def test_the_bias_gradient_is_not_scaled_by_a_rounded_share(appended, monkeypatch):
    """1/255 lies halfway between two bfloat16 numbers, 0.4 % from either."""
    rows, width, vocabulary = 255, 16, 4000
    monkeypatch.setitem(linear_module.BIAS_COLUMNS, "cpu", appended)
    tensors = [
        torch.randn(shape, requires_grad=True)
        for shape in ((rows, width), (vocabulary, width), (vocabulary,))
    ]
    labels = torch.randint(vocabulary, (rows,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_masked_cross_entropy(*tensors, labels)
        logits = F.linear(*tensors).detach().double().requires_grad_()
    ours = torch.autograd.grad(loss, tensors)[2]
    (dlogits,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits)
    # The errors of single elements have both signs.
    assert abs(float((ours.double() / dlogits.sum(0)).median()) - 1) < 5e-4


@needs_cpp
@pytest.mark.parametrize("max_logits_bytes", [2**31, 3000])
def test_gradients_of_a_product_in_float32_are_more_accurate(max_logits_bytes, monkeypatch):
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((70, 24), (301, 24), (301,))]
    labels = torch.randint(301, (70,))
    wide = [t.detach().bfloat16().double().requires_grad_() for t in tensors]
    logits = F.linear(*wide)
    truth = torch.autograd.grad(F.cross_entropy(logits, labels), wide)

    def errors():
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_masked_cross_entropy(*tensors, labels, max_logits_bytes=max_logits_bytes)
        ours = torch.autograd.grad(loss, tensors)
        assert all(gradient.dtype == torch.float32 for gradient in ours)
        return [float((a - b).norm() / b.norm()) for a, b in zip(ours, truth, strict=True)]

    monkeypatch.setitem(linear_module.BIAS_COLUMNS, "cpu", 8)
    narrow = errors()
    widening_products_on_cpu(monkeypatch)
    wider = errors()
    assert wider[1] < narrow[1] and wider[2] < narrow[2]


def test_linear_form_without_bias_with_tied_weight_and_no_labels():
    weight = torch.randn(40, 8, requires_grad=True)
    ids = torch.randint(40, (12,))
    for labels in (labels_for(12, 40, 0.5), torch.full((12,), -100)):
        hidden = F.embedding(ids, weight).tanh()
        loss = linear_masked_cross_entropy(hidden, weight, None, labels)
        (ours,) = torch.autograd.grad(loss, weight)
        hidden = F.embedding(ids, weight).tanh()
        (theirs,) = torch.autograd.grad(
            reference.masked_cross_entropy(F.linear(hidden, weight), labels), weight
        )
        torch.testing.assert_close(ours, theirs)


@needs_cpp
def test_linear_form_under_autocast_and_backward_twice():
    hidden, weight = (
        torch.randn(20, 16, requires_grad=True),
        torch.randn(90, 16, requires_grad=True),
    )
    bias, labels = torch.zeros(90, requires_grad=True), labels_for(20, 90, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_masked_cross_entropy(hidden, weight, bias, labels)
        expected = F.cross_entropy(F.linear(hidden, weight, bias).float(), labels)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    first = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight, bias))
    for a, b in zip(first, second, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


@needs_cpp
def test_logits_of_unlabelled_rows_never_exist():
    """The op's largest tensor has one row for each labelled token."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(value, torch.Tensor):
                    largest = max(largest, value.numel())
            return result

    labels = torch.full((200,), -100)
    labels[::10] = 5
    hidden = torch.randn(200, 4, requires_grad=True)
    weight = torch.randn(1000, 4, requires_grad=True)
    with Watch():
        linear_masked_cross_entropy(hidden, weight, None, labels).backward()
    assert largest == 20 * 1000


@pytest.mark.parametrize("ignore_index", [-100, -1, 3])
def test_more_labelled_rows_than_announced_never_pass_unseen(ignore_index, monkeypatch):
    hidden, weight = torch.randn(6, 4), torch.randn(10, 4)
    labels = torch.tensor([1, ignore_index, 2, 5, ignore_index, 9])
    loss_of = lambda number: linear_masked_cross_entropy(
        hidden, weight, None, labels, max_labels=number, ignore_index=ignore_index
    )
    torch.testing.assert_close(
        loss_of(4), F.cross_entropy(hidden @ weight.T, labels, ignore_index=ignore_index)
    )
    for number in (3, -1):
        with pytest.raises(ValueError, match=f"max_labels must be .* got {number} for 4 of them"):
            loss_of(number)
    # If the count is not read back, every label becomes one for which the kernels return NaN.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    chosen, targets, indices = select_labelled(
        hidden, labels, max_labels=3, ignore_index=ignore_index
    )
    assert torch.equal(indices, torch.tensor([0, 2, 3])) and torch.equal(chosen, hidden[indices])
    assert (targets < 0).all() and (targets != ignore_index).all()


@needs_cpp
def test_linear_form_in_torch_compile_full_graph_and_dynamic_shapes():
    compiled = torch.compile(
        linear_masked_cross_entropy, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (12, 31):
        tensors = [torch.randn(s, requires_grad=True) for s in ((rows, 8), (50, 8), (50,))]
        labels = labels_for(rows, 50, 0.4)
        labels[0] = 3
        expected = F.cross_entropy(F.linear(*tensors), labels)
        theirs = torch.autograd.grad(expected, tensors)
        for number in (None, int((labels != -100).sum())):
            ours = torch.autograd.grad(compiled(*tensors, labels, max_labels=number), tensors)
            torch.testing.assert_close(ours, theirs)


def test_module_takes_the_place_of_torchs():
    logits, labels = torch.randn(6, 9), torch.tensor([0, 8, -1, 3, -1, 2])
    for reduction in ("mean", "sum", "none"):
        arguments = dict(ignore_index=-1, reduction=reduction, label_smoothing=0.2)
        torch.testing.assert_close(
            fnn.CrossEntropyLoss(**arguments)(logits, labels),
            torch.nn.CrossEntropyLoss(**arguments)(logits, labels),
        )
    with pytest.raises(
        ValueError, match="weight must be None, because class weights are not computed"
    ):
        fnn.CrossEntropyLoss(torch.ones(9))


def test_bad_input_is_named():
    logits, labels = torch.randn(3, 10), torch.tensor([1, 2, 3])
    for bad, message in (
        (dict(logits=torch.ones(3, 2, 10)), "logits must be floating point of shape"),
        (dict(labels=labels.int()), "labels must be int64 of shape \\(3,\\).*got torch.int32"),
        (dict(labels=labels[:2]), "labels must be int64 of shape \\(3,\\)"),
        (dict(labels=torch.tensor([1, 10, 3])), "got 10 in row 1: was another vocabulary"),
        (dict(labels=torch.tensor([1, 2, -1])), "got -1 in row 2"),
        (dict(label_smoothing=1.5), "label_smoothing must be in \\[0, 1\\], got 1.5"),
        (dict(z_loss=-1.0), "z_loss must be a finite number of at least 0, got -1.0"),
        (dict(z_loss=float("nan")), "z_loss must be a finite number of at least 0, got nan"),
        (dict(reduction="max"), "reduction must be .* got 'max'"),
        (dict(impl="fast"), "impl must be one of"),
        (dict(impl="triton"), "impl='triton' cannot take this call: it has no Triton kernel"),
        (dict(impl="cuda"), "impl='cuda' cannot take this call: "),
    ):
        with pytest.raises(ValueError, match=message):
            masked_cross_entropy(**{"logits": logits, "labels": labels, **bad})
    hidden, weight = torch.randn(3, 4), torch.randn(10, 4)
    for bad, message in (
        (dict(weight=torch.randn(10, 5)), "weight must have shape \\(vocabulary, 4\\)"),
        (dict(bias=torch.zeros(9)), "bias must have shape \\(10,\\)"),
        (dict(weight=weight.bfloat16()), "weight must have hidden's dtype"),
        (dict(max_logits_bytes=0), "max_logits_bytes must be positive"),
        (dict(labels=torch.tensor([1, 2, 10])), "got 10 in row 2"),
    ):
        arguments = {"hidden": hidden, "weight": weight, "bias": None, "labels": labels}
        with pytest.raises(ValueError, match=message):
            linear_masked_cross_entropy(**{**arguments, **bad})


def test_the_logits_bound_is_a_share_of_a_gpu_s_memory(monkeypatch):
    default = linear_module._default_logits_bytes
    memory = lambda size: lambda device: SimpleNamespace(total_memory=size * 2**30)
    for size, share in ((141, 141 * 2**26), (80, 5 * 2**30), (16, 2**31)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", memory(size))
        assert default(torch.device("cuda")) == share
    assert default(torch.device("cpu")) == 2**31
