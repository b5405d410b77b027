import pytest
import torch

from fastenc.nn.relative_positions import RelativePositionSpec, distance_slots
from fastenc.ops import attention, disentangled_attention
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import EDGE_LENGTHS, offsets_of
from tests.helpers.disentangled_attention import TERMS, inputs_of, plain
from tests.helpers.extension import needs_cpp

EVERY_IMPL = pytest.mark.parametrize("impl", ["reference", pytest.param("cpp", marks=needs_cpp)])


def gradients(out, inputs, dout):
    return torch.autograd.grad(out, inputs.leaves(), dout.to(out.dtype))


def check(inputs, dout, impl):
    exact = inputs.to(torch.float64)
    results = [
        (out, *gradients(out, given, dout))
        for out, given in (
            (disentangled_attention(**inputs.arguments(), impl=impl), inputs),
            (plain(inputs), inputs),
            (plain(exact), exact),
        )
    ]
    names = ["out", "dqkv", *("dtable" for _ in inputs.leaves()[1:])]
    for name, *values in zip(names, *results, strict=True):
        assert_within_budget(*values, name)


@EVERY_IMPL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("terms", TERMS)
def test_values_and_gradients_keep_the_budget_at_edge_lengths(terms, dtype, impl):
    torch.manual_seed(0)
    inputs = inputs_of(EDGE_LENGTHS, 2, 32, terms, dtype=dtype)
    check(inputs, torch.randn(sum(EDGE_LENGTHS), 2, 32), impl)


@EVERY_IMPL
@pytest.mark.parametrize(("buckets", "farthest"), [(0, 7), (0, 100), (64, 512), (2, 4)])
def test_rows_of_every_kind_of_distance(buckets, farthest, impl):
    torch.manual_seed(0)
    inputs = inputs_of((70, 0, 3, 33), 3, 16, "both", buckets, farthest)
    check(inputs, torch.randn(106, 3, 16), impl)


@EVERY_IMPL
def test_without_tables_it_is_attention_with_the_same_dropout(impl):
    torch.manual_seed(0)
    inputs, state = inputs_of((5, 60, 17), 3, 32, "none"), torch.tensor([3, 4])
    ours = disentangled_attention(**inputs.arguments(), dropout_p=0.3, rng_state=state, impl=impl)
    offsets = offsets_of(inputs.lengths)
    theirs = attention(inputs.qkv, offsets, 60, dropout_p=0.3, rng_state=state, impl="reference")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [16, 48, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_instruction_set_keeps_the_budget(instruction_set, dim, dtype):
    torch.manual_seed(0)
    inputs = inputs_of((1, 0, 47, 48, 49, 97, 15, 17), 2, dim, "both", dtype=dtype)
    check(inputs, torch.randn(274, 2, dim), "cpp")


@needs_cpp
def test_dropout_and_its_gradients_are_the_references():
    torch.manual_seed(0)
    inputs, state = inputs_of((5, 130, 17), 3, 32), torch.tensor([5, 6])
    dout, results = torch.randn(152, 3, 32), []
    for impl in ("cpp", "reference"):
        arguments = inputs.arguments() | {
            "dropout_p": 0.3,
            "rng_state": state,
            "softmax_scale": 0.2,
        }
        out = disentangled_attention(**arguments, impl=impl)
        results.append((out, *gradients(out, inputs, dout)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@needs_cpp
def test_nothing_depends_on_the_number_of_threads():
    torch.manual_seed(0)
    inputs, before, results = inputs_of((50, 3, 90, 64, 7), 3, 32), torch.get_num_threads(), []
    dout = torch.randn(214, 3, 32)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        out = disentangled_attention(**inputs.arguments(), dropout_p=0.1)
        results.append((out, *gradients(out, inputs, dout)))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@needs_cpp
def test_strided_inputs_are_read_in_place_or_copied():
    torch.manual_seed(0)
    arguments = inputs_of((12, 8), 4, 16).arguments()
    expected = disentangled_attention(**arguments)
    wide = torch.randn(20, 3, 4, 48)
    wide[..., 8:24] = arguments["qkv"].detach()
    tables = {
        name: arguments[name].detach().transpose(0, 2).contiguous().transpose(0, 2)
        for name in ("position_keys", "position_queries")
    }
    out = disentangled_attention(**arguments | tables | {"qkv": wide[..., 8:24]})
    assert torch.equal(out, expected)


def test_nan_stays_in_its_sequence_and_no_tokens_are_none(instruction_set):
    torch.manual_seed(0)
    arguments = inputs_of((3, 20, 3), 2, 16).arguments()
    qkv = arguments["qkv"].detach().clone()
    qkv[10, 1, 0] = float("nan")  # a key of the second sequence's first head
    out = disentangled_attention(**arguments | {"qkv": qkv}, impl="cpp")
    assert out[3:23, 0].isnan().all() and out[3:23, 1].isfinite().all()
    assert out[:3].isfinite().all() and out[23:].isfinite().all()
    for lengths in ((), (0, 0)):
        inputs = inputs_of(lengths, 2, 16)
        grads = gradients(
            disentangled_attention(**inputs.arguments()), inputs, torch.zeros(0, 2, 16)
        )
        assert [x.shape for x in grads] == [x.shape for x in inputs.leaves()]
        assert not any(grad.any() for grad in grads[1:])


@needs_cpp
def test_no_heads_have_no_results_and_no_gradients():
    inputs = inputs_of((3, 2), 0, 16)
    for impl in ("reference", "cpp"):
        out = disentangled_attention(**inputs.arguments(), impl=impl)
        assert out.shape == (5, 0, 16)
        assert [x.shape for x in gradients(out, inputs, out)] == [x.shape for x in inputs.leaves()]


@needs_cpp
@pytest.mark.parametrize("terms", TERMS)
def test_registration_passes_opcheck_and_compiles(terms):
    inputs = inputs_of((4, 6), 2, 16, terms)
    named = inputs.arguments()
    q, k, v = (x.detach() for x in named["qkv"].unbind(1))
    tables = [named[name] for name in ("position_keys", "position_queries")]
    tables = [x if x is None else x.detach() for x in tables]
    arguments = (q, k, v, *tables, named["slots"], named["cu_seqlens"], torch.tensor([3, 4]))
    arguments = (*arguments, 6, 0.1, 0.25)
    out, lse = torch.ops.fastenc.disentangled_attention_fwd(*arguments)
    torch.library.opcheck(torch.ops.fastenc.disentangled_attention_fwd.default, arguments)
    torch.library.opcheck(
        torch.ops.fastenc.disentangled_attention_bwd.default, (out, out, lse, *arguments, True)
    )
    compiled = torch.compile(disentangled_attention, backend="aot_eager", fullgraph=True)
    dout = torch.randn(10, 2, 16)
    pairs = [
        (output, *gradients(output, inputs, dout))
        for output in (compiled(**named), disentangled_attention(**named))
    ]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


@needs_cpp
def test_long_sequences_keep_no_square_of_the_length():
    # 12,000 x 12,000 scores of one head would be 576 MB; resident memory is read from the operating system.
    resource = pytest.importorskip("resource")
    inputs = inputs_of((12000,), 1, 16, buckets=256, farthest=512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    disentangled_attention(**inputs.arguments()).sum().backward()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 120_000  # KB


def test_slots_are_those_of_transformers():
    from transformers.models.deberta_v2 import modeling_deberta_v2 as theirs

    for buckets, farthest in ((256, 512), (32, 128), (8, 40), (2, 4)):
        x = torch.empty(1, 700, 1)
        rows = theirs.build_relative_position(x, x, buckets, farthest)[0]
        wanted = (rows + buckets).clamp(0, 2 * buckets - 1)
        slots = distance_slots(RelativePositionSpec(buckets, farthest), farthest)
        position = torch.arange(700)
        distance = (position - position[:, None]).clamp(-farthest, farthest) + farthest
        assert torch.equal(slots[distance].long(), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(6, 2, 16)}, r"qkv must be floating point of shape .* view the fused"),
        ({"slots": torch.zeros(4).int()}, r"slots must be int32 of shape \(2 \* R \+ 1,\).*\(4,\)"),
        ({"slots": torch.zeros(5)}, "slots must be int32 .* got torch.float32"),
        ({"slots": torch.full((5,), 16).int()}, r"slots must be in \[0, 16\).*got 16"),
        ({"position_keys": torch.zeros(9, 2, 16)}, "must have as many rows, got 9 and 16"),
        ({"position_keys": torch.zeros(16, 2, 8)}, r"must have shape \(rows, 2, 16\)"),
        ({"position_queries": torch.zeros(16, 2, 16).half()}, "qkv's dtype torch.float32, got"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"cu_seqlens": torch.tensor([0, 3, 7]).int()}, "cu_seqlens"),
    ],
    ids=str,
)
def test_errors(change, message):
    arguments = inputs_of((3, 3), 2, 16).arguments()
    with pytest.raises(ValueError, match=message):
        disentangled_attention(**arguments | change)
