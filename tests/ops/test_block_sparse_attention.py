import pytest
import torch

from fastenc.ops import attention, block_sparse_attention
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import offsets_of
from tests.helpers.block_sparse_attention import inputs_of, plain
from tests.helpers.extension import needs_cpp

EVERY_IMPL = pytest.mark.parametrize("impl", ["reference", pytest.param("cpp", marks=needs_cpp)])
EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"]
)


def gradient(out, inputs, dout):
    return torch.autograd.grad(out, inputs.qkv, dout.to(out.dtype))[0]


def check(inputs, dout, impl):
    exact = inputs.to(torch.float64)
    results = [
        (out, gradient(out, given, dout))
        for out, given in (
            (block_sparse_attention(**inputs.arguments(), impl=impl), inputs),
            (plain(inputs), inputs),
            (plain(exact), exact),
        )
    ]
    for name, *values in zip(("out", "dqkv"), *results, strict=True):
        assert_within_budget(*values, name)


@EVERY_IMPL
@EVERY_DTYPE
@pytest.mark.parametrize(("block_size", "plans"), [(16, 1), (20, 3), (64, 3)])
def test_values_and_gradients_keep_the_budget(block_size, plans, dtype, impl):
    lengths = (1, 0, 16, 129, 64, 21)
    inputs = inputs_of(lengths, 3, 16, block_size, plans, dtype)
    check(inputs, torch.randn(sum(lengths), 3, 16), impl)


@EVERY_DTYPE
def test_every_instruction_set_keeps_the_budget(instruction_set, dtype):
    inputs = inputs_of((1, 47, 0, 150), 2, 48, 33, 2, dtype)
    check(inputs, torch.randn(198, 2, 48), "cpp")


@EVERY_IMPL
def test_a_plan_of_all_blocks_is_attention(impl):
    inputs = inputs_of((5, 60, 17), 3, 32, 16)
    inputs = inputs._replace(seen=[[counts * 0 + 1 for counts in inputs.seen[0]]])
    ours = block_sparse_attention(**inputs.arguments(), impl=impl)
    theirs = attention(inputs.qkv, offsets_of(inputs.lengths), 60, impl="reference")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@needs_cpp
def test_nothing_depends_on_threads_or_on_strides():
    inputs, before, results = inputs_of((50, 3, 90, 64), 4, 16, 16, 4), torch.get_num_threads(), []
    named, dout = inputs.arguments(), torch.randn(207, 4, 16)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        out = block_sparse_attention(**named)
        results.append((out, gradient(out, inputs, dout)))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    wide = torch.randn(207, 3, 4, 48)
    wide[..., 8:24] = inputs.qkv.detach()
    assert torch.equal(block_sparse_attention(**named | {"qkv": wide[..., 8:24]}), results[0][0])


def test_nan_stays_where_it_is_seen(instruction_set):
    """In its sequence and head, and in blocks that see its block."""
    inputs = inputs_of((3, 60, 3), 2, 16, 16)
    inputs.seen[0][1][:] = torch.eye(4).int()
    qkv = inputs.qkv.detach().clone()
    qkv[20, 1, 0] = float(
        "nan"
    )  # a key of the second block of the second sequence, of its first head
    out = block_sparse_attention(**inputs.arguments() | {"qkv": qkv}, impl="cpp")
    assert out[19:35, 0].isnan().all() and out[19:35, 1].isfinite().all()
    assert out[:19].isfinite().all() and out[35:].isfinite().all()


@needs_cpp
def test_registration_passes_opcheck_and_compiles():
    inputs = inputs_of((4, 36), 2, 16, 16, 2)
    named = inputs.arguments()
    q, k, v = inputs.qkv.detach().unbind(1)
    arguments = (q, k, v, *named["plan"], named["cu_seqlens"], 36, 16, 0.25)
    out, lse = torch.ops.fastenc.block_sparse_attention_fwd(*arguments)
    torch.library.opcheck(torch.ops.fastenc.block_sparse_attention_fwd.default, arguments)
    torch.library.opcheck(
        torch.ops.fastenc.block_sparse_attention_bwd.default, (out, out, lse, *arguments, True)
    )
    compiled = torch.compile(block_sparse_attention, backend="aot_eager", fullgraph=True)
    dout = torch.randn(40, 2, 16)
    pairs = [
        (out := function(**named), gradient(out, inputs, dout))
        for function in (compiled, block_sparse_attention)
    ]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


@needs_cpp
def test_long_sequences_keep_no_square_of_the_length():
    # 16,384 x 16,384 scores of one head would be 1 GB; resident memory is read from the operating system.
    resource = pytest.importorskip("resource")
    inputs = inputs_of((64,), 1, 16, 64)._replace(
        qkv=torch.randn(16384, 3, 1, 16, requires_grad=True),
        seen=[[torch.eye(256).int()]],
        lengths=(16384,),
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    block_sparse_attention(**inputs.arguments()).sum().backward()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 120_000  # KB


def with_plan(named, **changes):
    return {"plan": named["plan"]._replace(**changes)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda named: {"qkv": torch.zeros(6, 2, 16)}, r"qkv must be floating point of shape .* view the fused"),
        (lambda named: {"block_size": 0}, "block_size must be at least 1, got 0"),
        (lambda named: {"block_size": 3}, r"plan.starts must have 14 \+ 1 values.*is the plan of another batch"),
        (lambda named: with_plan(named, counts=torch.ones(2)), "plan.counts must be int32 .* got torch.float32"),
        (lambda named: with_plan(named, counts=torch.ones(2).int()), "must have as many values"),
        (lambda named: with_plan(named, starts=named["plan"].starts.flip(0)), "plan.starts must ascend from 0"),
        (lambda named: with_plan(named, columns=named["plan"].columns + 2), "plan.columns must be blocks of the row's"),
        (lambda named: with_plan(named, counts=named["plan"].counts * 0), "plan.counts must be at least 1, got 0"),
        (lambda named: {"cu_seqlens": torch.tensor([0, 3, 37]).int()}, "cu_seqlens"),
    ],
)  # fmt: skip
def test_errors(change, message):
    named = inputs_of((3, 33), 2, 16, 32).arguments()
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(**named | change(named))
