import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastenc.ops import linear_kl_divergence
from fastenc.reference import linear_kl_divergence as reference
from fastenc.testing import assert_within_budget


def inputs(rows=13, vocabulary=37, widths=(8, 12), dtype=torch.float32, scale=1.0):
    draw = lambda *shape: (scale * torch.randn(*shape)).to(dtype)
    student, teacher = widths
    return [
        *(draw(rows, student), draw(vocabulary, student), draw(vocabulary)),
        *(draw(rows, teacher), draw(vocabulary, teacher), draw(vocabulary)),
    ]


def run(function, values, dtype=None, **options):
    own = [
        v.to(dtype or v.dtype).detach().clone().requires_grad_(i < 3) for i, v in enumerate(values)
    ]
    loss = function(*own, **options)
    (3 * loss).backward()
    return [loss, *(value.grad for value in own[:3])]


@pytest.mark.parametrize("rows", [1, 13, 64, 65])
@pytest.mark.parametrize("block", [1, 4, 1000])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_and_gradients_keep_the_budget(rows, block, temperature):
    values = inputs(rows)
    limit = dict(max_logits_bytes=2 * 4 * 37 * block)
    result = run(linear_kl_divergence, values, temperature=temperature, **limit)
    plain = run(reference.linear_kl_divergence, values, temperature=temperature)
    truth = run(reference.linear_kl_divergence, values, torch.float64, temperature=temperature)
    for name, a, b, c in zip(
        ("loss", "hidden", "weight", "bias"), result, plain, truth, strict=True
    ):
        assert_within_budget(a, b, c, name)


def test_bfloat16_keeps_the_budget():
    values = inputs(dtype=torch.bfloat16)
    plain = run(reference.linear_kl_divergence, values)
    truth = run(reference.linear_kl_divergence, values, torch.float64)
    for a, b, c in zip(run(linear_kl_divergence, values), plain, truth, strict=True):
        assert_within_budget(a, b, c)


def test_it_is_torchs():
    values = inputs(dtype=torch.float64)
    logits, theirs = (F.linear(*three) / 2 for three in (values[:3], values[3:]))
    expected = F.kl_div(logits.log_softmax(1), theirs.softmax(1), reduction="batchmean") * 4
    torch.testing.assert_close(linear_kl_divergence(*values, temperature=2.0), expected)
    same = linear_kl_divergence(*values[:3], *values[:3])
    assert abs(same) < 1e-12
    assert torch.autograd.gradcheck(
        lambda *own: linear_kl_divergence(
            *own, *values[3:], temperature=2.0, max_logits_bytes=2400
        ),
        [value.clone().requires_grad_() for value in values[:3]],
        fast_mode=True,
    )


def test_rows_outside_the_mask_do_not_count():
    values = inputs(rows=9)
    mask = torch.tensor([True, False, True, True, False, False, True, False, True])
    chosen = [v[mask] if index in (0, 3) else v for index, v in enumerate(values)]
    for limit in (2 * 4 * 37 * 2, 2**20):
        masked = run(linear_kl_divergence, values, mask=mask, max_logits_bytes=limit)
        plain = run(reference.linear_kl_divergence, chosen)
        truth = run(reference.linear_kl_divergence, chosen, torch.float64)
        assert not masked[1][~mask].any()
        masked[1] = masked[1][mask]
        for a, b, c in zip(masked, plain, truth, strict=True):
            assert_within_budget(a, b, c)
    nothing = run(linear_kl_divergence, values, mask=torch.zeros(9, dtype=torch.bool))
    assert nothing[0] == 0 and not nothing[2].any()
    with pytest.raises(ValueError, match=r"mask must be bool of shape \(9,\), .* got torch.int64"):
        linear_kl_divergence(*values, mask=mask.long())


def test_edges():
    empty = run(linear_kl_divergence, inputs(rows=0))
    assert empty[0] == 0 and not empty[2].any() and empty[1].shape == (0, 8)
    extreme = run(linear_kl_divergence, inputs(scale=100.0))
    assert all(value.isfinite().all() for value in extreme)
    values = inputs()
    values[2] = values[5] = None
    torch.testing.assert_close(
        linear_kl_divergence(*values), reference.linear_kl_divergence(*values)
    )


def test_a_graph_that_is_kept_gives_the_same_gradient_again():
    values = inputs()
    hidden = values[0].requires_grad_()
    loss = linear_kl_divergence(hidden, *values[1:])
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    before = first.clone()
    first.zero_()
    assert torch.equal(torch.autograd.grad(loss, hidden)[0], before)
    assert not values[3].requires_grad


class NothingAsLargeAs(TorchDispatchMode):
    """Fails if an operation returns a tensor with ``limit`` elements or more; stores the largest size."""

    def __init__(self, limit):
        super().__init__()
        self.limit, self.largest = limit, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                shape = tuple(tensor.shape)
                assert tensor.numel() < self.limit, f"{function} made a tensor of shape {shape}"
        return result


def test_both_models_logits_never_exist_for_all_rows():
    values = inputs(rows=64, vocabulary=500)
    with NothingAsLargeAs(64 * 500 // 4) as mode:
        run(linear_kl_divergence, values, max_logits_bytes=2 * 4 * 500 * 8)
    assert mode.largest >= 8 * 500
    with pytest.raises(AssertionError, match="made a tensor"), NothingAsLargeAs(64 * 500 // 4):
        run(reference.linear_kl_divergence, values)


def test_compiled():
    values = inputs()
    compiled = torch.compile(
        linear_kl_divergence, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    expected = run(linear_kl_divergence, values)
    for a, b in zip(run(compiled, values), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_casts_first():
    values = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_kl_divergence(*values)
    low = [value.bfloat16() for value in values]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, linear_kl_divergence(*low))


def test_bad_input_is_named():
    values = inputs()
    for index, value, message in (
        (0, values[0][0], r"hidden must be floating point of shape \(rows, width\)"),
        (1, values[1][:, 1:], r"weight must have shape \(vocabulary, 8\), got \(37, 7\)"),
        (2, values[2][1:], r"bias must have shape \(37,\), got \(36,\)"),
        (3, values[3][1:], "the same number of rows, got 13 and 12"),
        (4, values[4][:, 1:], r"teacher_weight must have shape \(vocabulary, 12\)"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_kl_divergence(*values[:index], value, *values[index + 1 :])
    smaller = [*values[:4], values[4][1:], values[5][1:]]
    with pytest.raises(
        ValueError, match=r"the same vocabulary size, got 37 and 36: .* the same tokenizer"
    ):
        linear_kl_divergence(*smaller)
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        linear_kl_divergence(*values, temperature=0)
    with pytest.raises(ValueError, match="max_logits_bytes must be positive, got 0"):
        linear_kl_divergence(*values, max_logits_bytes=0)


def test_a_weight_of_another_dtype_is_named():
    x, weight = torch.randn(2, 8), torch.randn(5, 8)
    with pytest.raises(ValueError, match="teacher_bias must have teacher_hidden's dtype"):
        linear_kl_divergence(x, weight, None, x, weight, torch.zeros(5).double())
