import sys
import warnings

import pytest
import torch
from fastenc.kernels.attention_call import self_attention_call

from fastenc.nn.rotary import RotarySpec, rotary_table
from fastenc.ops import attention, cross_attention, dispatch
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import EDGE_LENGTHS, offsets_of, packed, plain, small_call, truth
from tests.helpers.compiled import compiled_once
from tests.helpers.extension import needs_cpp
from tests.helpers.processes import python


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 96, 128, 256, 512])
def test_values_and_gradients_keep_the_budget_at_edge_lengths(instruction_set, dim, dtype):
    qkv, cu_seqlens, longest = packed(EDGE_LENGTHS, 2, dim, dtype)
    dout = torch.randn(qkv.shape[0], 2, dim).to(dtype)
    exact_qkv = qkv.detach().double().requires_grad_()
    out = attention(qkv, cu_seqlens, longest, impl="cpp")
    theirs = plain(qkv, EDGE_LENGTHS)
    exact = truth(exact_qkv, cu_seqlens, longest)
    assert_within_budget(out, theirs, exact, "out")
    assert_within_budget(
        torch.autograd.grad(out, qkv, dout)[0],
        torch.autograd.grad(theirs, qkv, dout)[0],
        torch.autograd.grad(exact, exact_qkv, dout.double())[0],
        "dqkv",
    )


@pytest.mark.parametrize(
    ("impl", "dtype", "key_heads"),
    [
        ("cpp", torch.float32, 1),
        ("cpp", torch.float32, 2),
        ("cpp", torch.bfloat16, 2),
        ("triton", torch.float32, 2),
    ],
)
def test_grouped_queries_keep_the_budget(impl, dtype, key_heads, request):
    """Against heads of their own with the same keys and values, with window, relative bias and rotation."""
    if impl == "triton":
        request.getfixturevalue("triton_target")
    lengths, heads, dim = (5, 1, 33, 0, 70), 4, 16
    qkv = torch.randn(sum(lengths), heads + 2 * key_heads, dim).to(dtype).requires_grad_()
    options = {
        "window_size": (20, 9),
        "relative_bias": torch.randn(heads, 13).requires_grad_(),
        "rotary": rotary_table(RotarySpec(dim, 100.0), 70, "cpu"),
    }
    dout, exact_qkv = torch.randn(len(qkv), heads, dim), qkv.detach().double().requires_grad_()
    results = []
    for x, name in ((qkv, impl), (qkv, "reference"), (exact_qkv, "reference")):
        plain_call = (x, offsets_of(lengths), 70)
        named = {**options, "num_key_heads": key_heads}
        if name == "reference":
            q, k, v = x.split((heads, key_heads, key_heads), 1)
            k, v = (each.repeat_interleave(heads // key_heads, 1) for each in (k, v))
            plain_call, named = (torch.stack([q, k, v], 1), *plain_call[1:]), options
        out = attention(*plain_call, **named, impl=name)
        inputs = (x, options["relative_bias"])
        results.append((out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))))
    for index, values in enumerate(zip(*results, strict=True)):
        assert_within_budget(*values, f"result {index}")
    grouped = attention(
        qkv, offsets_of(lengths), 70, num_key_heads=key_heads, dropout_p=0.3,
        rng_state=torch.tensor([1, 2]), impl=impl,
    )  # fmt: skip
    reference = attention(
        qkv, offsets_of(lengths), 70, num_key_heads=key_heads, dropout_p=0.3,
        rng_state=torch.tensor([1, 2]), impl="reference",
    )  # fmt: skip
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(grouped, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [(-1, -1), (20, 20)], ids=["full", "window"])
def test_large_scores_and_values_around_a_large_mean_keep_the_budget(instruction_set, window):
    """The mean cancels in the gradient of the scores only if the probabilities add up to 1."""
    qkv = torch.randn(70, 3, 2, 32)
    qkv[:, 0] *= 30
    qkv[:, 2] += 40
    dout, cu_seqlens, qkv = torch.randn(70, 2, 32), offsets_of((70,)), qkv.requires_grad_()
    exact_qkv = qkv.detach().double().requires_grad_()
    results = [
        torch.autograd.grad(y, x, dout.to(y.dtype))[0]
        for y, x in (
            (attention(qkv, cu_seqlens, 70, window_size=window, impl="cpp"), qkv),
            (plain(qkv, (70,), window=window), qkv),
            (truth(exact_qkv, cu_seqlens, 70, window_size=window), exact_qkv),
        )
    ]
    for name, number in (("dq", 0), ("dk", 1), ("dv", 2)):
        assert_within_budget(*(result[:, number] for result in results), name)


def test_dropout_mask_and_gradient_are_the_references(instruction_set):
    qkv, cu_seqlens, longest = packed((5, 130, 17), 3, 32)
    dout = torch.randn(qkv.shape[0], 3, 32)
    results = []
    for impl in ("cpp", "reference"):
        torch.manual_seed(9)
        out = attention(qkv, cu_seqlens, longest, dropout_p=0.3, impl=impl)
        results.append((out, *torch.autograd.grad(out, qkv, dout)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_softmax_scale_and_strided_qkv(instruction_set):
    wide = torch.randn(20, 3, 4, 48)
    qkv, cu_seqlens = wide[..., 8:24], offsets_of((12, 8))
    assert not qkv.is_contiguous()
    out = attention(qkv, cu_seqlens, 12, softmax_scale=0.5, impl="cpp")
    torch.testing.assert_close(
        out, truth(qkv, cu_seqlens, 12, softmax_scale=0.5), rtol=1e-5, atol=1e-6
    )
    # Heads are interleaved with q, k and v, and the last stride is not 1.
    swapped = torch.randn(20, 4, 3, 16).transpose(1, 2)
    torch.testing.assert_close(
        attention(swapped, cu_seqlens, 12),
        truth(swapped, cu_seqlens, 12),
        rtol=1e-5,
        atol=1e-6,
    )
    backwards = torch.randn(16, 3, 4, 20).permute(3, 1, 2, 0)
    torch.testing.assert_close(
        attention(backwards, cu_seqlens, 12),
        truth(backwards, cu_seqlens, 12),
        rtol=1e-5,
        atol=1e-6,
    )


@needs_cpp
def test_order_of_packing_does_not_matter():
    parts = [torch.randn(n, 3, 2, 32) for n in (7, 33, 1, 80)]
    forward = attention(torch.cat(parts), offsets_of([len(p) for p in parts]), 80)
    backward = attention(torch.cat(parts[::-1]), offsets_of([len(p) for p in parts[::-1]]), 80)
    pieces = forward.split([len(p) for p in parts])
    assert torch.equal(torch.cat(pieces[::-1]), backward)


@needs_cpp
def test_result_does_not_depend_on_the_number_of_threads():
    qkv, cu_seqlens, longest = packed((50, 3, 90, 64), 3, 32)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        out = attention(qkv, cu_seqlens, longest, dropout_p=0.1)
        results.append((out, *torch.autograd.grad(out.sum(), qkv)))
    torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_no_tokens_and_nan_stays_in_its_sequence(instruction_set):
    qkv, cu_seqlens, _ = packed((), 2, 16)
    out = attention(qkv, cu_seqlens, 0)
    out.sum().backward()
    assert out.shape == (0, 2, 16) and qkv.grad.shape == qkv.shape
    qkv = torch.randn(9, 3, 2, 16)
    qkv[4, 1, 0] = float("nan")  # a key in the first head of the second sequence
    out = attention(qkv, offsets_of((3, 3, 3)), 3)
    assert out[3:6, 0].isnan().all()
    assert out[3:6, 1].isfinite().all() and out[[0, 1, 2, 6, 7, 8]].isfinite().all()


def test_huge_scores_do_not_overflow(instruction_set):
    qkv = 100 * torch.randn(40, 3, 2, 32)
    out = attention(qkv, offsets_of((40,)), 40)
    torch.testing.assert_close(out, plain(qkv, (40,)), rtol=1e-3, atol=1e-3)


@needs_cpp
def test_long_sequences_keep_no_square_of_the_length():
    # 12,000 x 12,000 scores of one head would take 576 MB. The operating system measures the resident memory.
    resource = pytest.importorskip("resource")
    qkv = torch.randn(12000, 3, 1, 16, requires_grad=True)
    cu_seqlens = offsets_of((12000,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attention(qkv, cu_seqlens, 12000).sum().backward()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


AFTER_TOO_LITTLE_MEMORY = """
import resource, torch
from fastenc.ops import attention

def attend(length):
    qkv, offsets = torch.ones(length, 3, 1, 16), torch.tensor([0, length]).int()
    return lambda: attention(qkv, offsets, length, window_size=(1, 1), impl="cpp")

small, large = attend(1000), attend(300_000)
small()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
try:
    large()
    raise SystemExit("the memory was enough")
except RuntimeError:
    assert (small() == 1).all()
"""


@needs_cpp
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_call_after_one_that_found_too_little_memory_works():
    """A thread keeps its scratch from call to call, and has none after that error."""
    done = python("-c", AFTER_TOO_LITTLE_MEMORY)
    assert done.returncode == 0, done.stderr or done.returncode


@needs_cpp
def test_registration_passes_opcheck():
    qkv, cu_seqlens, rng_state = torch.randn(10, 3, 2, 16), offsets_of((4, 6)), torch.tensor([3, 4])
    attention_call = self_attention_call(
        cu_seqlens, 6, scale=0.25, dropout_p=0.1, rng_state=rng_state
    )
    one_qkv = (*qkv.unbind(1), *attention_call)
    torch.library.opcheck(torch.ops.fastenc.attention_fwd.default, one_qkv)
    k, v = torch.randn(2, 7, 2, 16)
    separate = (
        qkv[:, 0],
        k,
        v,
        *attention_call._replace(cu_seqlens_k=offsets_of((0, 7)), max_seqlen_k=7),
    )
    for arguments, one_tensor in ((one_qkv, True), (separate, False)):
        out, lse = torch.ops.fastenc.attention_fwd(*arguments)
        gradients = (torch.randn(10, 2, 16), torch.randn(2, 10))
        torch.library.opcheck(
            torch.ops.fastenc.attention_bwd.default,
            (*gradients, out, lse, *arguments, one_tensor, False, one_tensor),
        )


@needs_cpp
def test_torch_compile_full_graph_and_dynamic_shapes():
    compiled = compiled_once(
        lambda qkv, cu, longest: attention(qkv, cu, longest).square().sum(),
    )
    for lengths in ((3, 5, 4), (7, 2)):
        qkv, cu_seqlens, longest = packed(lengths, 2, 16)
        (ours,) = torch.autograd.grad(compiled(qkv, cu_seqlens, longest), qkv)
        (theirs,) = torch.autograd.grad(plain(qkv, lengths).square().sum(), qkv)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"qkv": torch.zeros(6, 2, 2, 16)},
            "qkv must be floating point of shape .* \\(6, 2, 2, 16\\)",
        ),
        ({"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens must be int32.*got torch.int64"),
        (
            {"cu_seqlens": torch.tensor([0, 3, 2, 6]).int()},
            "must not decrease, got 3 then 2 at index 2",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 5]).int()},
            "from 0 to the number of tokens 6, got 0 to 5",
        ),
        ({"max_seqlen": 2}, "max_seqlen must be at least the longest sequence, got 2"),
        ({"dropout_p": -0.1}, "dropout_p must be in \\[0, 1\\)"),
        (
            {"qkv": torch.zeros(6, 3, 2, 20), "impl": "cpp"},
            "head_dim must be a multiple of 16 up to 512, got 20",
        ),
        (
            {"qkv": torch.zeros(6, 7, 16), "num_key_heads": 2},
            r"shape \(total_tokens, num_heads \+ 2 \* 2, head_dim\) with num_heads a multiple of 2",
        ),
        ({"num_key_heads": 1}, r"num_heads \+ 2 \* 1, head_dim\), got .* \(6, 3, 2, 16\)"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        attention(**small_call(**change))


@needs_cpp
def test_a_direct_call_of_the_op_is_guarded_too():
    with pytest.raises(RuntimeError, match="longer than max_seqlen"):
        torch.ops.fastenc.attention_fwd(
            *torch.zeros(3, 6, 2, 16),
            *self_attention_call(torch.tensor([0, 6]).int(), 3, scale=1.0),
        )


@needs_cpp
@pytest.mark.parametrize(
    "change, reason",
    [({"dim": 20}, "head_dim must be a multiple of 16"), ({"dtype": torch.float64}, "float64")],
)
def test_auto_warns_once_when_it_has_to_take_the_quadratic_reference(change, reason):
    qkv, cu_seqlens, longest = packed((4, 3), 2, change.get("dim", 16))
    qkv = qkv.detach().to(change.get("dtype", torch.float32))
    dispatch._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=f"attention takes its reference.*square.*{reason}"):
        attention(qkv, cu_seqlens, longest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(qkv, cu_seqlens, longest)
        attention(qkv, cu_seqlens, longest, impl="reference")


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_bound_far_above_the_longest_sequence_costs_nothing(impl):
    qkv, cu_seqlens, longest = packed((5, 70), 2, 16)
    options = {"window_size": (9, 4), "relative_bias": torch.randn(2, 11), "impl": impl}
    results = []
    for bound in (longest, 10**9):
        out = attention(qkv, cu_seqlens, bound, **options)
        results.append((out, *torch.autograd.grad(out.sum(), qkv)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_cross_attention_is_named_in_its_errors():
    q, cu_seqlens = torch.zeros(4, 2, 20), offsets_of((4,))
    with pytest.raises(ValueError, match=r"^cross_attention: impl='cpp' cannot take this call"):
        cross_attention(q, q, q, cu_seqlens, cu_seqlens, 4, 4, impl="cpp")
