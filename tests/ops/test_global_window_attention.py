import pytest
import torch

from fastenc.ops import attention, global_window_attention
from fastenc.ops.global_window_attention import offsets_of_globals
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import EDGE_LENGTHS, offsets_of
from tests.helpers.extension import needs_cpp
from tests.helpers.global_window_attention import inputs_of, plain

EVERY_IMPL = pytest.mark.parametrize("impl", ["reference", pytest.param("cpp", marks=needs_cpp)])
NAMES = ("out", "dqkv", "dglobal_q", "dglobal_kv")


def gradients(out, inputs, dout):
    return torch.autograd.grad(out, inputs.leaves(), dout.to(out.dtype))


def check(inputs, impl):
    exact, dout = inputs.to(torch.float64), torch.randn(inputs.qkv[:, 0].shape)
    results = [
        (out, *gradients(out, given, dout))
        for out, given in (
            (global_window_attention(**inputs.arguments(), impl=impl), inputs),
            (plain(inputs), inputs),
            (plain(exact), exact),
        )
    ]
    for name, *values in zip(NAMES, *results, strict=True):
        assert_within_budget(*values, name)


@EVERY_IMPL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("window", [(4, 4), (-1, 3)])
def test_values_and_gradients_keep_the_budget_at_edge_lengths(window, dtype, impl):
    check(inputs_of(EDGE_LENGTHS, 2, 32, window, dtype=dtype), impl)


@EVERY_IMPL
@pytest.mark.parametrize("chosen", [[69, 70], list(range(73))], ids=str)
def test_no_one_and_only_global_tokens(chosen, impl):
    check(inputs_of((70, 0, 3), 3, 16, (5, 2), chosen), impl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_instruction_set_keeps_the_budget(instruction_set, dtype):
    for dim in (16, 48, 128):
        check(inputs_of((1, 0, 49, 97), 2, dim, (0, 16), dtype=dtype), "cpp")


@EVERY_IMPL
def test_without_global_tokens_it_is_attention_with_the_same_dropout(impl):
    inputs, state = inputs_of((5, 60, 17), 3, 32, chosen=[]), torch.tensor([3, 4])
    options = {"dropout_p": 0.3, "rng_state": state}
    ours = global_window_attention(**inputs.arguments(), **options, impl=impl)
    window = {"window_size": inputs.window}
    theirs = attention(inputs.qkv, offsets_of(inputs.lengths), 60, **options, **window)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@needs_cpp
def test_dropout_and_its_gradients_are_the_references():
    inputs, state = inputs_of((5, 130, 17), 3, 32), torch.tensor([5, 6])
    dout, results = torch.randn(152, 3, 32), []
    for impl in ("cpp", "reference"):
        options = {"dropout_p": 0.3, "rng_state": state, "softmax_scale": 0.2, "impl": impl}
        out = global_window_attention(**inputs.arguments(), **options)
        results.append((out, *gradients(out, inputs, dout)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@needs_cpp
def test_nothing_depends_on_the_number_of_threads():
    inputs, before, results = inputs_of((50, 3, 90), 3, 32), torch.get_num_threads(), []
    dout = torch.randn(143, 3, 32)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        out = global_window_attention(**inputs.arguments(), dropout_p=0.1)
        results.append((out, *gradients(out, inputs, dout)))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_nan_stays_in_its_sequence_and_no_tokens_are_none(instruction_set):
    named = inputs_of((3, 20, 3), 2, 16, chosen=[0, 5, 23]).arguments()
    qkv = named["qkv"].detach().clone()
    qkv[10, 1, 0] = float("nan")  # a key of the second sequence's first head
    out = global_window_attention(**named | {"qkv": qkv}, impl="cpp")
    assert out[10, 0].isnan().all() and out[:, 1].isfinite().all()
    # Four tokens away it is in no window, and the global token has other keys.
    assert out[:6].isfinite().all() and out[15:].isfinite().all()
    for lengths in ((), (0, 0)):
        inputs = inputs_of(lengths, 2, 16)
        out = global_window_attention(**inputs.arguments())
        grads = gradients(out, inputs, torch.zeros(0, 2, 16))
        assert [x.shape for x in grads] == [x.shape for x in inputs.leaves()]


@needs_cpp
def test_registration_passes_opcheck_and_compiles():
    inputs, dout = inputs_of((4, 9), 2, 16, (2, 1)), torch.randn(13, 2, 16)
    chosen, offsets = inputs.global_tokens, offsets_of(inputs.lengths)
    tensors = (*inputs.qkv.detach().unbind(1), chosen, offsets_of_globals(chosen, offsets), offsets)
    arguments = (*tensors, torch.tensor([3, 4]), 9, 0.3, 0.25, 2, 1)
    out, lse = torch.ops.fastenc.global_window_attention_fwd(*arguments)
    torch.library.opcheck(torch.ops.fastenc.global_window_attention_fwd.default, arguments)
    torch.library.opcheck(
        torch.ops.fastenc.global_window_attention_bwd.default, (dout, out, lse, *arguments, True)
    )
    compiled = torch.compile(global_window_attention, backend="aot_eager", fullgraph=True)
    pairs = [
        (result, *gradients(result, inputs, dout))
        for result in (
            compiled(**inputs.arguments()),
            global_window_attention(**inputs.arguments()),
        )
    ]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


@needs_cpp
def test_long_sequences_keep_no_square_of_the_length():
    # 12,000 x 12,000 scores of one head would be 576 MB; resident memory is read from the operating system.
    resource = pytest.importorskip("resource")
    inputs = inputs_of((12000,), 1, 16, (32, 32), chosen=[0, 7])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    global_window_attention(**inputs.arguments()).sum().backward()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # KB


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(6, 2, 16)}, r"qkv must be floating point of shape .* view the fused"),
        ({"global_q": torch.zeros(2, 2, 8)}, r"global_q must have shape \(G, 2, 16\)"),
        ({"global_q": torch.zeros(3, 2, 16)}, "a row for each of the 2 global tokens, got 3"),
        ({"global_kv": torch.zeros(6, 3, 2, 16)}, r"global_kv must have shape \(6, 2, 2, 16\)"),
        ({"global_kv": torch.zeros(6, 2, 2, 16).half()}, "qkv's dtype torch.float32, got torch.fl"),
        ({"global_tokens": torch.tensor([0, 3]).int()}, r"int64 of shape \(G,\).*got torch.int32"),
        ({"global_tokens": torch.tensor([3, 0])}, r"must ascend .* got \[3, 0\]: give each"),
        ({"global_tokens": torch.tensor([0, 6])}, "less than the 6 tokens of the batch"),
        ({"window_size": (-2, 1)}, "window_size"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"cu_seqlens": torch.tensor([0, 3, 7]).int()}, "cu_seqlens"),
    ],
    ids=str,
)
def test_errors(change, message):
    named = inputs_of((3, 3), 2, 16, chosen=[0, 3]).arguments()
    with pytest.raises(ValueError, match=message):
        global_window_attention(**named | change)
