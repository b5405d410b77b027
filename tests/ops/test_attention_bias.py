"""Window, biases, log-sum-exp and separate keys: the definition against torch, and C++ against both."""

import pytest
import torch
from fastenc.kernels.attention_call import self_attention_call

import fastenc.ops.encoder_layer  # noqa: F401  (defines the ops of a layer)
from fastenc.ops import attention, cross_attention
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import (
    CASES,
    Case,
    inputs_of,
    offsets_of,
    plain,
    rounding_of,
    run,
    run_peer,
    run_reference,
    small_call,
    with_extreme_scores,
)
from tests.helpers.compiled import compiled_once
from tests.helpers.extension import needs_cpp


@pytest.mark.parametrize("name", CASES)
def test_reference_is_torchs_attention_with_an_explicit_mask(name):
    case = CASES[name]
    inputs = inputs_of(case, 2, 8, torch.float64)
    ours, theirs = run(case, inputs, impl="reference"), run_peer(case, inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    if theirs.requires_grad:  # without any key there is no gradient
        dout = torch.randn_like(ours)
        grads = [
            torch.autograd.grad(
                out, inputs.leaves(), dout, allow_unused=True, materialize_grads=True
            )
            for out in (ours, theirs)
        ]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "lengths_q, lengths_k",
    [((1, 0, 63, 64, 65), (129, 4, 1, 0, 127)), ((2, 128, 5), (128, 3, 65)), ((3, 1), (0, 0))],
)
def test_keys_of_their_own_keep_the_budget(instruction_set, lengths_q, lengths_k, dtype):
    check_cpp(Case(lengths_q, lengths_k), 32, dtype)


LONG_CASES = {
    "long, narrow window": Case((300, 40), window=(3, 0)),
    "long, one token": Case((150,), window=(0, 0)),
    "long, window, relative": Case((7, 333), window=(70, 20), relative=30, key_bias=True),
    "long, cross, window": Case((60, 290), (400, 130), window=(9, 30), relative=5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [*CASES, *LONG_CASES])
def test_window_and_biases_keep_the_budget(instruction_set, name, dtype):
    check_cpp((CASES | LONG_CASES)[name], 32, dtype)


@pytest.mark.parametrize("dim", [16, 48, 64, 112, 128])
def test_window_and_biases_at_every_size_of_the_heads(instruction_set, dim):
    check_cpp(Case((1, 70, 0, 200), window=(20, 9), relative=12, alibi=True), dim, torch.bfloat16)


def check_cpp(case, dim, dtype):
    inputs = inputs_of(case, 2, dim, dtype)
    exact_inputs = inputs.to(torch.float64)
    out, lse = run(case, inputs, return_lse=True, impl="cpp")
    theirs = run_peer(case, inputs)
    exact, exact_lse = run_reference(case, exact_inputs)
    assert_within_budget(out, theirs, exact, "out")
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    grads = [
        torch.autograd.grad(
            result, leaves, dout.to(result.dtype), allow_unused=True, materialize_grads=True
        )
        for result, leaves in (
            (out, inputs.leaves()),
            (theirs, inputs.leaves()),
            (exact, exact_inputs.leaves()),
        )
    ]
    for index, values in enumerate(zip(*grads, strict=True)):
        assert_within_budget(*values, f"gradient {index}", rounded=rounding_of(lse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [*CASES, "full", "cross without biases"])
def test_extreme_scores_give_torchs_numbers(instruction_set, name, dtype):
    """Compared with float64. The scores are exact, so their softmax is as exact as that of small scores."""
    more = {"full": Case((70, 0, 3)), "cross without biases": Case((66, 3), (9, 140))}
    case = (CASES | more)[name]
    for magnitude in (2.0**12, -(2.0**20), 2.0**40, -(2.0**66)):
        inputs = with_extreme_scores(inputs_of(case, 2, 16, dtype), magnitude)
        exact_inputs = inputs.to(torch.float64)
        results = []
        for y, leaves in (
            (run(case, inputs, impl="cpp"), inputs.leaves()),
            (run_peer(case, exact_inputs), exact_inputs.leaves()),
        ):
            dout = torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype).to(y.dtype)
            grads = (
                torch.autograd.grad(y, leaves, dout, allow_unused=True, materialize_grads=True)
                if y.requires_grad  # without any key there is no gradient
                else [torch.zeros_like(leaf) for leaf in leaves]
            )
            results.append([y, *grads])
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        for ours, exact in zip(*results, strict=True):
            size = max(1.0, float(exact.detach().abs().max())) if exact.numel() else 1.0
            torch.testing.assert_close(
                ours.double() / size,
                exact / size,
                rtol=0,
                atol=tolerance,
                msg=lambda m, at=magnitude: f"scores of {at:g}: {m}",
            )


@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_extreme_scores_in_a_layers_inference(instruction_set, dtype, few_rows):
    """The layer multiplies by an identity, so queries, keys and values stay as they are."""
    case = Case((40, 3), window=(9, 20))
    for magnitude in (2.0**20, -(2.0**66)):
        (qkv,) = with_extreme_scores(inputs_of(case, 1, 16, dtype), magnitude).qkv
        attended = torch.ops.fastenc.encoder_layer_attention(
            *(qkv.detach().flatten(1), offsets_of(case.lengths_q), 40, None, None, few_rows),
            *([torch.eye(48, dtype=dtype)], None, False, 1, 1, 16, 0.25, None, None, 0.0),
            *case.window,
        )
        exact = plain(qkv.detach().double(), case.lengths_q, window=case.window)
        # In pairs of bfloat16, probabilities and results are rounded.
        tolerance = 0.01 if attended.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            attended.double(), exact.flatten(1), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize(
    "case", [Case((5, 60), (70, 3)), Case((5, 60), (70, 9), (2, 8), relative=4)]
)
def test_gradient_through_the_log_sum_exp(instruction_set, case):
    inputs = inputs_of(case, 2, 16)
    results = []
    for impl in ("cpp", "reference"):
        out, lse = run(case, inputs, return_lse=True, impl=impl)
        seen = lse.masked_fill(lse.isinf(), 0)
        both = torch.autograd.grad(out.sum() + seen.square().sum(), inputs.leaves())
        _, lse = run(case, inputs, return_lse=True, impl=impl)
        alone = lse.masked_fill(lse.isinf(), 0).sum()
        results.append((lse, *both, *torch.autograd.grad(alone, inputs.leaves()[:2])))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_parts_of_the_keys_combine_by_their_log_sum_exp():
    q, k, v = torch.randn(3, 12, 2, 8)
    whole = offsets_of((12,))
    one_call = cross_attention(q, k, v, whole, whole, 12, 12)
    parts = [
        cross_attention(q, k[part], v[part], whole, offsets_of((n,)), 12, n, return_lse=True)
        for part, n in ((slice(5), 5), (slice(5, 12), 7))
    ]
    weights = torch.stack([lse for _, lse in parts]).softmax(0)
    combined = sum(
        out * weight.T[..., None] for (out, _), weight in zip(parts, weights, strict=True)
    )
    torch.testing.assert_close(combined, one_call)


@pytest.mark.parametrize(
    "case",
    [
        Case((5, 70, 17), (130, 0, 20)),
        Case((5, 400), window=(60, 3)),
        Case((5, 300), relative=10, key_bias=True, window=(7, 30)),
        Case((70, 5), (3, 70), relative=10, alibi=True),
    ],
    ids=["cross", "window", "window, relative", "cross, relative"],
)
def test_cpp_dropout_is_the_references(instruction_set, case):
    inputs = inputs_of(case, 3, 32)
    dout = torch.randn(sum(case.lengths_q), 3, 32)
    results = []
    for impl in ("cpp", "reference"):
        torch.manual_seed(9)
        out = run(case, inputs, dropout_p=0.3, impl=impl)
        results.append((out, *torch.autograd.grad(out, inputs.leaves(), dout)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=3e-5)


def test_t5_buckets_expand_into_a_relative_bias():
    pytest.importorskip("transformers")
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(
        d_model=32, d_kv=16, num_heads=2, relative_attention_num_buckets=32, dropout_rate=0.0
    )
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    lengths, span = (150, 40), layer.relative_attention_max_distance
    bucket = layer._relative_position_bucket(
        torch.arange(-span, span + 1), num_buckets=32, max_distance=span
    )
    weight = layer.relative_attention_bias.weight
    x = torch.randn(sum(lengths), 32)
    q, k, v = (projection(x).view(-1, 2, 16) for projection in (layer.q, layer.k, layer.v))
    cu_seqlens = offsets_of(lengths)
    mixed = attention(
        torch.stack((q, k, v), 1),
        cu_seqlens,
        max(lengths),
        softmax_scale=1.0,
        relative_bias=weight[bucket].T,
    )
    ours = layer.o(mixed.flatten(1))
    theirs = torch.cat([layer(part[None])[0][0] for part in x.split(list(lengths))])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    dout = torch.randn_like(ours)
    for one, other in zip(
        *(torch.autograd.grad(out, [weight, layer.q.weight], dout) for out in (ours, theirs)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_rows_without_a_visible_key_give_zero_and_pass_no_gradient():
    key_bias = torch.tensor([float("-inf")] * 4 + [0.0] * 3)
    qkv = torch.randn(7, 3, 2, 16, requires_grad=True)
    out, lse = attention(qkv, offsets_of((4, 3)), 4, key_bias=key_bias, return_lse=True)
    assert (out[:4] == 0).all() and (lse[:, :4] == -float("inf")).all()
    assert lse[:, 4:].isfinite().all()
    out.sum().backward()
    assert (qkv.grad[:4] == 0).all() and qkv.grad[4:].abs().sum() > 0


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_hidden_neighbour_in_memory_does_not_leak(impl):
    qkv = torch.randn(9, 3, 2, 16)
    qkv[3:] = float("nan")
    qkv.requires_grad_()
    key_bias, table = torch.randn(9), torch.randn(2, 5, requires_grad=True)
    key_bias[3:] = float("nan")
    out = attention(
        qkv,
        offsets_of((3, 6)),
        6,
        window_size=(2, 2),
        key_bias=key_bias,
        relative_bias=table,
        impl=impl,
    )
    assert out[:3].isfinite().all()
    out[:3].sum().backward()
    assert qkv.grad[:3].isfinite().all()


@needs_cpp
def test_gradients_do_not_depend_on_the_number_of_threads():
    case = Case((50, 3, 90, 64, 1, 0), window=(40, 25), relative=9)
    inputs = inputs_of(case, 3, 32)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = run(case, inputs)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs.leaves())))
    torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_biases_may_have_any_dtype(dtype):
    case = Case((5, 9), relative=3, alibi=True, key_bias=True)
    inputs = inputs_of(case, 2, 16)
    table = inputs.relative.detach().to(dtype).requires_grad_()
    given = inputs._replace(
        relative=table, slopes=inputs.slopes.to(dtype), key_bias=inputs.key_bias.to(dtype)
    )
    results = []
    for impl in ("auto", "reference"):
        out = run(case, given, impl=impl)
        gradient = torch.autograd.grad(out.square().sum(), table)[0]
        assert gradient.dtype == dtype
        results.append((out, gradient))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


@needs_cpp
def test_registration_passes_opcheck():
    case = Case((4, 6), window=(3, 2), relative=2, alibi=True, key_bias=True)
    inputs = inputs_of(case, 2, 16)
    (qkv,) = inputs.qkv
    rotary = torch.randn(6, 8)
    arguments = (
        *qkv.detach().unbind(1),
        *self_attention_call(
            inputs.cu_seqlens[0],
            6,
            scale=0.25,
            alibi_slopes=inputs.slopes,
            relative_bias=inputs.relative.detach(),
            key_bias=inputs.key_bias,
            rotary=rotary,
            window_left=case.window[0],
            window_right=case.window[1],
        ),
    )
    torch.library.opcheck(torch.ops.fastenc.attention_fwd.default, arguments)
    out, lse = torch.ops.fastenc.attention_fwd(*arguments)
    torch.library.opcheck(
        torch.ops.fastenc.attention_bwd.default,
        (torch.randn(10, 2, 16), None, out, lse, *arguments, True, True, True),
    )


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_torch_compile_takes_a_window_and_a_bias_with_dynamic_shapes(impl):
    options = {"window_size": (9, 9), "impl": impl}
    compiled = compiled_once(
        lambda q, k, v, cu_q, cu_k, longest_q, longest_k, table: (
            cross_attention(
                q, k, v, cu_q, cu_k, longest_q, longest_k, relative_bias=table, **options
            )
            .square()
            .sum()
        ),
        backend="eager",
    )
    for lengths_q, lengths_k in (((3, 5), (4, 8)), ((7, 2, 9), (6, 3, 10))):
        case = Case(lengths_q, lengths_k, window=(9, 9), relative=4)
        inputs = inputs_of(case, 2, 16)
        loss = compiled(*inputs.qkv, *inputs.cu_seqlens, *inputs.max_seqlens, inputs.relative)
        theirs = run_peer(case, inputs).square().sum()
        for one, other in zip(
            *(torch.autograd.grad(out, inputs.leaves()) for out in (loss, theirs)), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@needs_cpp
def test_torch_compile_takes_cpp_with_dynamic_shapes():
    compiled = compiled_once(
        lambda q, k, v, cu_q, cu_k, longest_q, longest_k: cross_attention(
            q, k, v, cu_q, cu_k, longest_q, longest_k, return_lse=True, impl="cpp"
        ),
    )
    for lengths_q, lengths_k in (((3, 5), (4, 8)), ((7, 2, 9), (6, 3, 10))):
        case = Case(lengths_q, lengths_k)
        inputs = inputs_of(case, 2, 16)
        out, lse = compiled(*inputs.qkv, *inputs.cu_seqlens, *inputs.max_seqlens)
        exact, exact_lse = run_reference(case, inputs)
        losses = [a.square().sum() + b.square().sum() for a, b in ((out, lse), (exact, exact_lse))]
        for one, other in zip(
            *(torch.autograd.grad(loss, inputs.leaves()) for loss in losses), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"window_size": (1, -2)}, "window_size must be .left, right.*got \\(1, -2\\)"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes must be floating point of shape \\(2,\\)"),
        ({"relative_bias": torch.zeros(2, 4)}, "relative_bias must be .*2 \\* R \\+ 1.*\\(2, 4\\)"),
        ({"key_bias": torch.zeros(6).bool()}, "key_bias must be floating point.*got torch.bool"),
        ({"key_bias": torch.zeros(5)}, "key_bias must be floating point of shape \\(6,\\)"),
        (
            {"key_bias": torch.zeros(6, requires_grad=True)},
            "key_bias is not differentiable.*detach it",
        ),
    ],
)
def test_bad_biases_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        attention(**small_call(**change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(6, 16)}, "q must be floating point of shape .total_q"),
        ({"k": torch.zeros(4, 2, 8)}, "k must have shape \\(total_k, 2 or a divisor of it, 16\\)"),
        (
            {"v": torch.zeros(3, 2, 16)},
            "v must have shape .*got torch.float32 of shape \\(3, 2, 16",
        ),
        ({"v": torch.zeros(4, 2, 16).half()}, "v must have .*dtype torch.float32"),
        ({"cu_seqlens_k": torch.tensor([0, 4, 5]).int()}, "cu_seqlens_k must run from 0 to .* 4"),
        ({"max_seqlen_q": 2}, "max_seqlen_q must be at least the longest sequence, got 2"),
        ({"cu_seqlens_k": torch.tensor([0, 4]).int()}, "one entry for each sequence, got 3 and 2"),
    ],
)
def test_bad_separate_tensors_are_named(change, message):
    arguments = {
        "q": torch.zeros(6, 2, 16),
        "k": torch.zeros(4, 2, 16),
        "v": torch.zeros(4, 2, 16),
        "cu_seqlens_q": torch.tensor([0, 3, 6]).int(),
        "cu_seqlens_k": torch.tensor([0, 0, 4]).int(),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }
    with pytest.raises(ValueError, match=message):
        cross_attention(**{**arguments, **change})
