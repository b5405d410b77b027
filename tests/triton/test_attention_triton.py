"""The Triton kernels behind fastenc.ops.attention: on a GPU, or interpreted."""

import pytest
import torch
from fastenc.kernels import attention_short
from fastenc.kernels.attention_call import self_attention_call

from fastenc.ops import attention
from fastenc.ops.attention import triton_limit
from fastenc.ops.attention_blocks import AttentionBlocks
from fastenc.reference.attention import attention as reference
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import (
    CASES,
    Case,
    inputs_of,
    offsets_of,
    packed,
    plain,
    rounding_of,
    run,
    run_peer,
    run_reference,
    truth,
)
from tests.helpers.gpu import deterministic


@pytest.fixture(autouse=True)
def large_tiles():
    """In the interpreter float32 uses TF32's tiles, which are fewer than IEEE's; its products stay exact."""
    before = torch.backends.cuda.matmul.fp32_precision
    if not torch.cuda.is_available():
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def gradients_of(out, leaves, dout):
    """The gradients in the present mode; 0 for an input without a gradient."""
    return torch.autograd.grad(
        out, leaves, dout, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def gradients(out, leaves, dout):
    """{mode: gradients} for both modes of our backward. The compared function may have no deterministic mode."""
    atomic = gradients_of(out, leaves, dout)
    with deterministic():
        return {"atomic": atomic, "deterministic": gradients_of(out, leaves, dout)}


@pytest.mark.parametrize("dim", [16, 32, 64, 96, 128, 256])
def test_values_and_gradients_keep_the_budget_at_edge_lengths(triton_target, dim):
    lengths = (1, 0, 63, 64, 65, 129) if dim == 32 else (5, 0, 130)
    on_gpu = triton_target.device.type == "cuda"
    dtypes = triton_target.dtypes if on_gpu or dim == 32 else [torch.float16]
    for dtype in dtypes if dim <= 128 else set(dtypes) - {torch.float32}:
        qkv, cu_seqlens, longest = packed(lengths, 2, dim, dtype)
        qkv = qkv.detach().to(triton_target.device).requires_grad_()
        cu_seqlens = cu_seqlens.to(triton_target.device)
        dout = torch.randn(qkv.shape[0], 2, dim, device=qkv.device).to(dtype)
        exact_qkv = qkv.detach().double().requires_grad_()
        out = attention(qkv, cu_seqlens, longest, impl=triton_target.impl)
        theirs = plain(qkv, lengths)
        exact = truth(exact_qkv, cu_seqlens, longest)
        assert_within_budget(out, theirs, exact, f"{dtype} out")
        (plain_dqkv,) = torch.autograd.grad(theirs, qkv, dout)
        (exact_dqkv,) = torch.autograd.grad(exact, exact_qkv, dout.double())
        for mode, (dqkv,) in gradients(out, qkv, dout).items():
            assert_within_budget(dqkv, plain_dqkv, exact_dqkv, f"{dtype} {mode} dqkv")


@pytest.mark.parametrize(
    "lengths, dim",
    [
        ((1, 0, 63, 64, 2, 0, 0, 30, 33, 1), 32),  # tiles of 64
        ((0, 128, 127, 1, 65, 3, 128), 32),  # tiles of 128
        ((100, 27, 128, 0), 64),  # one sequence begins at the last token of a window
        ((20,) * 9, 16),
        ((1,) * 130, 16),
        ((64, 64), 96),
        ((64, 3, 1), 128),
        ((128, 5, 100), 128),
    ],
)
def test_short_sequences_keep_the_budget(triton_target, lengths, dim):
    for dtype in set(triton_target.dtypes) - {torch.float32}:
        qkv, cu_seqlens, longest = packed(lengths, 2, dim, dtype)
        qkv = qkv.detach().to(triton_target.device).requires_grad_()
        cu_seqlens = cu_seqlens.to(triton_target.device)
        exact_qkv = qkv.detach().double().requires_grad_()
        out, lse = attention(qkv, cu_seqlens, longest, return_lse=True, impl=triton_target.impl)
        theirs = plain(qkv, lengths)
        exact, exact_lse = reference(*exact_qkv.unbind(1), *[cu_seqlens] * 2, *[longest] * 2)
        assert_within_budget(out, theirs, exact, f"{dtype} out")
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
        dout = torch.randn_like(out)
        assert_within_budget(
            torch.autograd.grad(out, qkv, dout)[0],
            torch.autograd.grad(theirs, qkv, dout)[0],
            torch.autograd.grad(exact, exact_qkv, dout.double())[0],
            f"{dtype} dqkv",
        )


@pytest.mark.parametrize("lengths", [(5, 0, 40), (3, 130)], ids=["short", "any length"])
def test_heads_that_share_keys_keep_the_budget(triton_target, lengths):
    """Against PyTorch's attention with a copy of the keys and values for each head; the bias's gradient is a sum."""
    heads, key_heads, dim = 4, 2, 16
    qkv = torch.randn(sum(lengths), heads + 2 * key_heads, dim, dtype=torch.float16)
    qkv, cu_seqlens = qkv.to(triton_target.device).requires_grad_(), offsets_of(lengths)
    cu_seqlens, exact_qkv = cu_seqlens.to(qkv.device), qkv.detach().double().requires_grad_()
    of_each_head = torch.arange(heads, device=qkv.device) // 2
    columns = [heads + of_each_head, heads + key_heads + of_each_head]
    copied = lambda x: torch.stack([x[:, :heads], *(x[:, each] for each in columns)], 1)
    named = {"num_key_heads": key_heads, "impl": triton_target.impl}
    out = attention(qkv, cu_seqlens, max(lengths), **named)
    theirs, exact = plain(copied(qkv), lengths), plain(copied(exact_qkv), lengths)
    assert_within_budget(out, theirs, exact, "out")
    dout = torch.randn_like(out)
    (plain_dqkv,) = torch.autograd.grad(theirs, qkv, dout)
    (exact_dqkv,) = torch.autograd.grad(exact, exact_qkv, dout.double())
    for mode, (dqkv,) in gradients(out, qkv, dout).items():
        assert_within_budget(dqkv, plain_dqkv, exact_dqkv, f"{mode} dqkv")
    parts = qkv.detach().split((heads, key_heads, key_heads), 1)
    attention_call = (*parts, *self_attention_call(cu_seqlens, max(lengths), scale=dim**-0.5))
    out, lse = torch.ops.fastenc.attention_fwd(*attention_call)
    _, *_, dbias = torch.ops.fastenc.attention_bwd(
        dout, None, out, lse, *attention_call, True, False, True
    )
    exact_sum, rounding = exact_dqkv.flatten(1).sum(0), exact_dqkv.abs().flatten(1).sum(0)
    assert ((dbias - exact_sum).abs() <= 8 * torch.finfo(qkv.dtype).eps * rounding + 1e-6).all()


def test_heads_of_more_than_128_columns_are_for_2_byte_types():
    for dtype in (torch.bfloat16, torch.float16):
        assert triton_limit(256, dtype) is None
    assert triton_limit(128, torch.float32) is None
    assert "at most 128 in torch.float32, got 144" in triton_limit(144, torch.float32)
    assert "at most 256, got 272" in triton_limit(272, torch.bfloat16)


@pytest.mark.parametrize(
    "lengths, block, whole",
    [
        ((16,) * 5, 64, True),
        ((64,) * 2, 64, True),
        ((128,) * 2, 128, True),
        ((48,) * 4, 64, False),  # the third begins in the second segment
        ((64, 32, 64), 64, False),
    ],
)
def test_no_program_has_an_empty_tile_where_lengths_divide_it(
    triton_target, monkeypatch, lengths, block, whole
):
    """The host knows it from the number of tokens. The same batch with a larger max_seqlen has two tiles a segment."""
    grids, run_kernel = [], attention_short.run

    def noting(kernel, grid, *arguments, **named):
        if "tiles" in named:
            grids.append(grid)
        run_kernel(kernel, grid, *arguments, **named)

    monkeypatch.setattr(attention_short, "run", noting)
    qkv, cu_seqlens, longest = packed(lengths, 1, 16, torch.float16)
    qkv = qkv.detach().to(triton_target.device).requires_grad_()
    cu_seqlens, dout = cu_seqlens.to(qkv.device), torch.randn_like(qkv[:, 0])
    results = []
    for max_seqlen in {longest, min(longest + 1, block)}:
        out = attention(qkv, cu_seqlens, max_seqlen, impl=triton_target.impl)
        results.append((out, *torch.autograd.grad(out, qkv, dout)))
        segments = -(-sum(lengths) // block)
        tiles = 1 if whole and max_seqlen == longest else 2
        assert grids == [(tiles * segments, 1)] * 2
        grids.clear()
    theirs = plain(qkv, lengths)
    expected = (theirs, *torch.autograd.grad(theirs, qkv, dout))
    for ours in results:
        assert all(map(torch.equal, ours, results[0]))
        torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "lengths, dim, dtype",
    [
        ((70, 0, 5, 128), 16, torch.float16),
        ((70, 0, 5), 16, torch.float32),
        ((0, 0), 16, torch.float16),
        ((0, 0), 16, torch.float32),
    ],
    ids=["short", "any length", "short, no token", "any length, no token"],
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_bias_gradient_is_the_sum_of_the_gradients(
    triton_target, lengths, dim, dtype, dropout_p
):
    """In both modes, and with a rotation, for which a separate pass computes the sum."""
    qkv, cu_seqlens, longest = packed(lengths, 2, dim, dtype)
    qkv, cu_seqlens = qkv.detach().to(triton_target.device), cu_seqlens.to(triton_target.device)
    rng_state = torch.tensor([3, 4], device=qkv.device) if dropout_p else None
    table = torch.randn(longest, dim, device=qkv.device)
    plain = self_attention_call(
        cu_seqlens, longest, scale=dim**-0.5, dropout_p=dropout_p, rng_state=rng_state
    )
    for rotary in (None, table):
        attention_call = (*qkv.unbind(1), *plain._replace(rotary=rotary))
        out, lse = torch.ops.fastenc.attention_fwd(*attention_call)
        dout = torch.randn_like(out)
        backward = lambda out=out, lse=lse, dout=dout, attention_call=attention_call: (
            torch.ops.fastenc.attention_bwd(
                dout, None, out, lse, *attention_call, True, False, True
            )
        )
        atomic = backward()
        with deterministic():
            both = (atomic, backward())
        for dqkv, *_, dbias in both:
            assert dbias.dtype == torch.float32
            wide = dqkv.double().flatten(1)
            # Each summed gradient was rounded. The sum of the keys' gradients is 0, so what is left is rounding.
            error = (dbias - wide.sum(0)).abs()
            assert (error <= 8 * torch.finfo(dtype).eps * wide.abs().sum(0) + 1e-6).all()


@pytest.mark.parametrize("lengths", [(5, 20, 39, 64), (70, 17, 128)])
def test_dropout_of_short_sequences_is_the_references(triton_target, lengths):
    qkv, cu_seqlens, longest = packed(lengths, 3, 32, torch.float16)
    qkv = qkv.detach().to(triton_target.device).requires_grad_()
    cu_seqlens = cu_seqlens.to(triton_target.device)
    results = []
    for impl in (triton_target.impl, "reference"):
        torch.manual_seed(9)
        out = attention(qkv, cu_seqlens, longest, dropout_p=0.3, impl=impl)
        results.append((out, *torch.autograd.grad(out.square().sum(), qkv)))
    for ours, theirs in zip(
        *results, strict=True
    ):  # a wrong mask would be off by the values themselves
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_dropout_mask_and_gradient_are_the_references(triton_target):
    lengths = (5, 70, 17)
    qkv, cu_seqlens, longest = packed(lengths, 3, 32)
    qkv = qkv.detach().to(triton_target.device).requires_grad_()
    cu_seqlens = cu_seqlens.to(triton_target.device)
    dout = torch.randn(qkv.shape[0], 3, 32, device=qkv.device)
    both = []
    for impl in (triton_target.impl, "reference"):
        torch.manual_seed(9)
        both.append(attention(qkv, cu_seqlens, longest, dropout_p=0.3, impl=impl))
    ours, theirs = both
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    (expected,) = torch.autograd.grad(theirs, qkv, dout)
    for (dqkv,) in gradients(ours, qkv, dout).values():
        torch.testing.assert_close(dqkv, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "lengths, dtype",
    [
        ((3, 140, 0, 66, 128, 1, 129), torch.float16),
        ((270, 20), torch.float16),
        ((127, 130, 1), torch.float16),  # a long sequence begins at the last token of a window
        ((250, 1, 140), torch.float16),
        ((20, 30), torch.float16),
        ((3, 140, 0, 66), torch.float32),
    ],
)
def test_blocks_of_the_batch_change_no_result(triton_target, lengths, dtype):
    """In both modes, short sequences beside long ones stay on their kernel."""
    qkv, cu_seqlens, longest = packed(lengths, 1, 16, dtype)
    qkv = qkv.detach().to(triton_target.device).requires_grad_()
    cu_seqlens, dout = cu_seqlens.to(qkv.device), torch.randn_like(qkv[:, 0])
    blocks = AttentionBlocks(*torch.ops.fastenc.attention_blocks(cu_seqlens, 20, 15))
    results = []
    for given in (None, blocks):
        torch.manual_seed(9)
        options = {"dropout_p": 0.2, "blocks": given, "impl": triton_target.impl}
        out, lse = attention(qkv, cu_seqlens, longest, return_lse=True, **options)
        grads = gradients(out, qkv, dout)
        results.append((out, lse, *grads["atomic"], *grads["deterministic"]))
    # One kernel computes delta from the output, which was rounded, the other from the probabilities.
    tolerance = 5e-3 if dtype == torch.float16 else 1e-5
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_float32_products_are_ieees_or_tf32s_by_choice(dim):
    """TF32 stores 11 bits of each factor, so its error lies between float32's and bfloat16's."""
    lengths = (5, 130, 300)
    qkv, cu_seqlens, longest = packed(lengths, 2, dim)
    qkv, cu_seqlens = qkv.detach().cuda().requires_grad_(), cu_seqlens.cuda()
    exact_qkv = qkv.detach().double().requires_grad_()
    exact = truth(exact_qkv, cu_seqlens, longest)
    dout = torch.randn_like(qkv[:, 0])
    expected = (exact, *torch.autograd.grad(exact, exact_qkv, dout.double()))
    worst = {}
    for precision in ("ieee", "tf32"):
        torch.backends.cuda.matmul.fp32_precision = precision  # large_tiles() sets it back
        out = attention(qkv, cu_seqlens, longest, impl="triton")
        results = (out, *gradients_of(out, qkv, dout))
        distances = [(a - b).norm() / b.norm() for a, b in zip(results, expected, strict=True)]
        worst[precision] = max(float(distance) for distance in distances)
    assert worst["ieee"] < 1e-5
    assert 5e-5 < worst["tf32"] < 3e-3


def test_softmax_scale_strides_and_slack_in_max_seqlen(triton_target):
    device, impl = triton_target.device, triton_target.impl
    cu_seqlens = offsets_of((12, 8)).to(device)
    strided = torch.randn(20, 3, 4, 48)[..., 8:24].to(device)
    swapped = torch.randn(20, 4, 3, 16).to(device).transpose(1, 2)
    backwards = torch.randn(16, 3, 4, 20).to(device).permute(3, 1, 2, 0)
    for qkv in (strided, swapped, backwards):
        out = attention(qkv, cu_seqlens, 100, softmax_scale=0.5, impl=impl)
        theirs = truth(qkv, cu_seqlens, 12, softmax_scale=0.5)
        torch.testing.assert_close(out, theirs, rtol=1e-5, atol=1e-6)


def test_no_tokens_nan_in_another_sequence_and_huge_scores(triton_target):
    device, impl = triton_target.device, triton_target.impl
    empty = torch.zeros(0, 3, 2, 16, device=device, requires_grad=True)
    out = attention(empty, offsets_of(()).to(device), 0, impl=impl)
    out.sum().backward()
    assert out.shape == (0, 2, 16) and empty.grad.shape == empty.shape
    qkv = torch.randn(9, 3, 2, 16, device=device)
    qkv[4, 1, 0] = float("nan")  # a key in the first head of the second sequence
    out = attention(qkv, offsets_of((3, 3, 3)).to(device), 3, impl=impl)
    assert out[3:6, 0].isnan().all()
    assert out[3:6, 1].isfinite().all() and out[[0, 1, 2, 6, 7, 8]].isfinite().all()
    huge = 100 * torch.randn(40, 3, 2, 32, device=device)
    out = attention(huge, offsets_of((40,)).to(device), 40, impl=impl)
    torch.testing.assert_close(out, plain(huge, (40,)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_window_and_biases_keep_the_budget(triton_target, name):
    case = CASES[name]
    on_gpu = triton_target.device.type == "cuda"
    for dtype in triton_target.dtypes if on_gpu else [torch.float32]:
        inputs = inputs_of(case, 2, 32, dtype, triton_target.device)
        exact_inputs = inputs.to(torch.float64)
        out, lse = run(case, inputs, return_lse=True, impl=triton_target.impl)
        theirs = run_peer(case, inputs)
        exact, exact_lse = run_reference(case, exact_inputs)
        assert_within_budget(out, theirs, exact, f"{dtype} out")
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
        dout = torch.randn_like(out)
        plain_grads = gradients_of(theirs, inputs.leaves(), dout)
        exact_grads = gradients_of(exact, exact_inputs.leaves(), dout.double())
        rounded = rounding_of(lse)
        for mode, grads in gradients(out, inputs.leaves(), dout).items():
            for place, values in enumerate(zip(grads, plain_grads, exact_grads, strict=True)):
                assert_within_budget(*values, f"{dtype} {mode} gradient {place}", rounded=rounded)


@pytest.mark.parametrize(
    "case",
    [
        Case((5, 70), (70, 140), window=(60, 3)),
        Case((5, 70), relative=10, key_bias=True),
        Case((70, 5), (3, 70), relative=10),
        CASES["causal, relative"],
    ],
    ids=["window", "relative", "cross, relative", "causal, relative"],
)
def test_dropout_with_window_and_biases_is_the_references(triton_target, case):
    inputs = inputs_of(case, 2, 32, device=triton_target.device)
    both = []
    for impl in (triton_target.impl, "reference"):
        torch.manual_seed(9)
        both.append(run(case, inputs, dropout_p=0.3, impl=impl))
    ours, theirs = both
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    dout = torch.randn_like(ours)
    expected = torch.autograd.grad(theirs, inputs.leaves(), dout)
    for grads in gradients(ours, inputs.leaves(), dout).values():
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)


def test_gradient_through_the_log_sum_exp(triton_target):
    case = Case((5, 70), key_bias=True)
    inputs = inputs_of(case, 2, 32, device=triton_target.device)
    results = []
    for impl in (triton_target.impl, "reference"):
        out, lse = run(case, inputs, return_lse=True, impl=impl)
        lse = lse.masked_fill(lse.isinf(), 0)
        results.append(torch.autograd.grad(out.sum() + lse.square().sum(), inputs.leaves())[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_relative_gradient_repeats_bit_for_bit(triton_target):
    case = Case((70, 3, 65, 20), relative=4)
    inputs = inputs_of(case, 2, 32, device=triton_target.device)
    out = run(case, inputs, impl=triton_target.impl)
    one, two = (
        torch.autograd.grad(out.sum(), [inputs.relative], retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(one, two)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive(triton_target, scale):
    """Only for such scales, maxima and masks come after the scale."""
    for dtype in triton_target.dtypes:
        qkv = torch.randn(25, 3, 2, 16, device=triton_target.device).to(dtype).requires_grad_()
        offsets = torch.tensor([0, 20, 25], dtype=torch.int32, device=qkv.device)
        dout = torch.randn(25, 2, 16, device=qkv.device).to(dtype)
        ours = attention(qkv, offsets, 20, softmax_scale=scale, impl=triton_target.impl)
        wide = qkv.detach().double().requires_grad_()
        theirs = attention(wide, offsets, 20, softmax_scale=scale, impl="reference")
        results = zip(
            (ours, *gradients_of(ours, qkv, dout)),
            (theirs, *gradients_of(theirs, wide, dout.double())),
            strict=True,
        )
        # bfloat16 rounds probabilities and scores' gradients to 8 bits before they are summed.
        atol = 1e-2 if dtype == torch.bfloat16 else 2e-3
        for mine, truly in results:
            torch.testing.assert_close(mine.double(), truly, rtol=2e-2, atol=atol)


def hidden_by_the_lowest_number(inputs):
    """Every key of the first sequence gets the bias with which transformers hides keys, so sdpa sees equal scores."""
    inputs.key_bias[:] = 0.0
    inputs.key_bias[: inputs.cu_seqlens[-1][1]] = torch.finfo(torch.float32).min
    return inputs


def test_keys_that_are_all_hidden_by_the_lowest_number_are_equal(triton_target):
    case = Case((70, 20), key_bias=True)
    inputs = hidden_by_the_lowest_number(inputs_of(case, 2, 32, device=triton_target.device))
    out, lse = run(case, inputs, return_lse=True, impl=triton_target.impl)
    torch.testing.assert_close(out, run_peer(case, inputs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, run_reference(case, inputs)[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case((70, 20), key_bias=True),
        Case((70, 20), relative=5, key_bias=True),
        Case((70, 5), (130, 3), window=(60, 70), key_bias=True),
    ],
    ids=["key bias", "relative, key bias", "cross, window, key bias"],
)
def test_gradients_of_keys_that_are_all_hidden_by_the_lowest_number(triton_target, case):
    """Each query gives all keys that it sees the same probability, as sdpa does in the same dtype."""
    inputs = hidden_by_the_lowest_number(inputs_of(case, 2, 32, device=triton_target.device))
    out = run(case, inputs, impl=triton_target.impl)
    dout = torch.randn_like(out)
    expected = gradients_of(run_peer(case, inputs), inputs.leaves(), dout)
    for gradient in gradients(out, inputs.leaves(), dout).values():
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1e10, 1e14])
@pytest.mark.parametrize(
    "dtype, window", [(torch.float16, (-1, -1)), (torch.float32, (-1, -1)), (torch.float32, (9, 9))]
)
def test_scores_beyond_10_to_the_10(triton_target, dtype, window, scale):
    """Equal scores share the probability; lower scores have none."""
    qkv = torch.randn(70, 3, 2, 16, device=triton_target.device).to(dtype)
    qkv[:, :2] = torch.randint(-2, 3, (70, 2, 2, 16)).to(qkv)
    out, lse = attention(
        qkv, offsets_of((50, 20)).to(qkv.device), 50,
        softmax_scale=scale, window_size=window, return_lse=True, impl=triton_target.impl,
    )  # fmt: skip
    wide = qkv.double()
    expected = truth(
        wide, offsets_of((50, 20)).to(qkv.device), 50, softmax_scale=scale, window_size=window
    )
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
    assert lse.isfinite().all()


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(
    "element, scale", [(32.0, 16.0), (2.0**12, 8.0), (2.0**13, 2.0**7)], ids=["1e4", "1e8", "1e10"]
)
@pytest.mark.parametrize(
    "dtype, lengths, window",
    [
        (torch.float16, (30, 0, 34), (-1, -1)),
        (torch.float16, (100, 28), (-1, -1)),
        (torch.float32, (50, 7), (-1, -1)),
        (torch.float32, (50, 7), (9, 9)),
    ],
    ids=["short", "short, two tiles", "any length", "window"],
)
def test_gradients_of_large_scores(
    triton_target, dtype, lengths, window, element, scale, dropout_p
):
    """The products are exact and often equal. Equal scores share the probability, so some gradients are not 0."""
    total, longest = sum(lengths), max(lengths)
    qkv = torch.randn(total, 3, 1, 16, device=triton_target.device).to(dtype)
    qkv[:, :2] = element * torch.randint(-1, 2, (total, 2, 1, 16)).to(qkv)
    qkv[:, :2, :, 3:] = 0.0
    qkv.requires_grad_()
    offsets = offsets_of(lengths).to(qkv.device)
    options = {"softmax_scale": scale, "window_size": window, "dropout_p": dropout_p}
    wide = qkv.detach().double().requires_grad_()
    torch.manual_seed(9)
    out = attention(qkv, offsets, longest, **options, impl=triton_target.impl)
    torch.manual_seed(9)
    exact = attention(wide, offsets, longest, **options, impl="reference")
    dout = torch.randn_like(out) / 256  # so that no gradient is beyond float16
    (expected,) = torch.autograd.grad(exact, wide, dout.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for mode, (dqkv,) in gradients(out, qkv, dout).items():
        for gradient, true in zip(dqkv.unbind(1), expected.unbind(1), strict=True):
            assert true.abs().amax() > 0
            assert (gradient - true).abs().amax() <= tolerance * true.abs().amax(), mode
