"""The CUDA kernels on a GPU: real sizes, capture, compilation, synchronisation. Another file emulates them on a CPU."""

import pytest
import torch
import torch.nn.functional as F

from fastenc.ops import library, linear_masked_cross_entropy, masked_cross_entropy
from fastenc.testing import assert_within_budget
from tests.helpers.cross_entropy import check_loss_and_gradient, labels_for
from tests.helpers.gpu import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not library.HAS_CUDA, reason="the extension was compiled without CUDA"),
]
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "rows,vocabulary", [(1, 1), (9, 37), (33, 5003), (2048, 30522), (200, 50368), (1000, 250002)]
)
def test_loss_and_gradient_keep_the_budget(rows, vocabulary, reduction, dtype):
    logits = (3 * torch.randn(rows, vocabulary, device="cuda")).to(dtype)
    labels = labels_for(rows, vocabulary, 0.15).cuda()
    labels[-1] = vocabulary - 1
    options = dict(label_smoothing=0.1, z_loss=1e-3, reduction=reduction)
    check_loss_and_gradient(logits, labels, "cuda", **options)


@pytest.mark.parametrize("vocabulary", [3000, 70000, 300001])
def test_large_infinite_and_nan_logits(vocabulary):
    logits = torch.randn(4, vocabulary, device="cuda")
    logits[0, 7] = 1e4
    logits[1, : vocabulary - 900] = -float("inf")
    logits[2, :] = -1e4
    logits[3, 1234] = float("nan")
    labels = torch.tensor([7, vocabulary - 100, 0, 1], device="cuda")
    logits.requires_grad_()
    losses = masked_cross_entropy(logits, labels, reduction="none", impl="cuda")
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    ours, theirs = (torch.autograd.grad(v.sum(), logits)[0][:3] for v in (losses, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_label_outside_the_vocabulary_gives_nan():
    logits = torch.randn(3, 50, device="cuda", requires_grad=True)
    labels = torch.tensor([4, 50, -7], device="cuda")
    losses = masked_cross_entropy(logits, labels, reduction="none", impl="cuda")
    losses.sum().backward()
    assert losses.isnan().tolist() == [False, True, True]
    assert logits.grad.isnan().all(1).tolist() == [False, True, True]


def test_more_than_two_to_the_31_logits():
    rows, vocabulary = 2**31 // 30528 + 100, 30528
    logits = torch.ones(rows, vocabulary, device="cuda", dtype=torch.bfloat16)
    labels = torch.full((rows,), -100, device="cuda")
    labels[-1] = 5
    logits[-1, 7] = 4
    losses = torch.ops.fastenc.masked_cross_entropy_(logits, labels, -100, 0.0, 0.0, None)
    row = torch.zeros(1, vocabulary, device="cuda", requires_grad=True)
    expected = F.cross_entropy(
        row + 3 * (torch.arange(vocabulary, device="cuda") == 7), labels[-1:]
    )
    expected.backward()
    torch.testing.assert_close(losses[-1], expected)
    torch.testing.assert_close(logits[-1].float(), row.grad[0], rtol=1e-2, atol=1e-6)
    assert not logits[:-1].any()


def linear_inputs(dtype, tokens=512, width=256, vocabulary=30522):
    shapes = ((tokens, width), (vocabulary, width), (vocabulary,))
    tensors = [
        (torch.randn(shape, device="cuda") * scale).to(dtype).requires_grad_()
        for shape, scale in zip(shapes, (1, 0.1, 1), strict=True)
    ]
    labels = labels_for(tokens, vocabulary, 0.15)
    return tensors, labels.cuda(), int((labels != -100).sum())


@DTYPES
@pytest.mark.parametrize("max_logits_bytes", [2**31, 2**20])
def test_linear_form_keeps_the_budget_and_waits_for_nothing(max_logits_bytes, dtype):
    tensors, labels, number = linear_inputs(dtype)
    plain = F.cross_entropy(F.linear(*tensors), labels)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    truth = F.cross_entropy(F.linear(*wide), labels)
    theirs, exact = torch.autograd.grad(plain, tensors), torch.autograd.grad(truth, wide)
    for limit in (None, number, number + 9):
        with no_waiting():
            loss = linear_masked_cross_entropy(
                *tensors,
                labels,
                max_labels=limit,
                max_logits_bytes=max_logits_bytes,
                impl="cuda",
            )
            ours = torch.autograd.grad(loss, tensors)
        for name, *triple in zip(("dhidden", "dweight", "dbias"), ours, theirs, exact, strict=True):
            assert_within_budget(*triple, name)
    short = linear_masked_cross_entropy(*tensors, labels, max_labels=number - 1, impl="cuda")
    assert short.isnan()


def test_loss_and_gradient_wait_for_nothing():
    logits = torch.randn(300, 30522, device="cuda", requires_grad=True)
    labels = labels_for(300, 30522).cuda()
    with no_waiting():
        masked_cross_entropy(logits, labels, impl="cuda").backward()
    assert logits.grad.isfinite().all()


def test_captured_graph_follows_its_inputs():
    tensors, labels, number = linear_inputs(torch.bfloat16, tokens=64, width=64)

    def step():
        loss = linear_masked_cross_entropy(
            *tensors, labels, max_labels=number, max_logits_bytes=2**20, impl="cuda"
        )
        return loss.detach(), *torch.autograd.grad(loss, tensors)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        tensors[0].mul_(-1)
    labels.copy_(labels.roll(3))
    graph.replay()
    torch.testing.assert_close(captured, step())


def test_torch_compile_full_graph_and_dynamic_shapes():
    compiled = torch.compile(masked_cross_entropy, fullgraph=True, dynamic=True)
    for rows in (4, 9):
        logits = torch.randn(rows, 5003, device="cuda", requires_grad=True)
        labels = labels_for(rows, 5003, 0.8).cuda()
        labels[0] = 3
        (ours,) = torch.autograd.grad(compiled(logits, labels, impl="cuda"), logits)
        (theirs,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("vocabulary", [30522, 70000, 300001])
def test_a_loss_and_its_gradient_repeat_bit_for_bit(vocabulary):
    logits = torch.randn(300, vocabulary, device="cuda", requires_grad=True)
    labels = labels_for(300, vocabulary, 0.5).cuda()
    both = []
    for _ in range(2):
        loss = masked_cross_entropy(logits, labels, impl="cuda")
        both.append((loss, *torch.autograd.grad(loss, logits)))
    for one, same in zip(*both, strict=True):
        assert torch.equal(one, same)


def test_registration_passes_opcheck():
    logits = torch.randn(5, 40, device="cuda")
    labels = torch.tensor([1, -100, 3, 39, -100], device="cuda")
    ops, divisor = torch.ops.fastenc, torch.tensor(3, device="cuda")
    options = (logits, labels, -100, 0.1, 0.0, divisor)
    torch.library.opcheck(ops.masked_cross_entropy_fwd.default, (*options, True))
    torch.library.opcheck(ops.masked_cross_entropy_.default, options)
    factors = torch.tensor([2.0], device="cuda")
    torch.library.opcheck(ops.scale_labelled_rows_.default, (logits, labels, -100, factors))
