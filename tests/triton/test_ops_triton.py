"""What every op with a GPU kernel must do: on a GPU at the sizes of real encoders, or interpreted at small sizes."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing._internal.optests.generate_tests import DEFAULT_TEST_UTILS

from fastenc import ops, packing
from fastenc.ops import cases, dispatch
from fastenc.ops.cases import Case, Draw, Size
from fastenc.testing import assert_within_budget
from fastenc.testing.operators import OperatorCalls
from tests.helpers.attention_cases import offsets_of
from tests.helpers.compiled import compiled_once
from tests.helpers.gpu import deterministic

SMALL = Size((5, 0, 33, 20), width=32, inner=128, heads=2, head_dim=16, vocabulary=50)
# For what does not depend on the number of tiles.
TINY = SMALL._replace(lengths=(5, 0, 3))
DRAW = Random(0)
REAL = Size(
    (512, 1, 0, *(DRAW.randint(1, 512) for _ in range(62))),  # 16k tokens
    *(768, 3072, 12, 64, 30522),
)


def size_of(target, heads=12) -> Size:
    if target.device.type == "cpu":
        return SMALL
    return REAL._replace(heads=heads, width=64 * heads, inner=256 * heads)


def cut(size: Size) -> Size:
    """Sequences for the kernels of short ones."""
    return size._replace(lengths=tuple(min(n, 128) for n in size.lengths))


def of_heads(head_dim: int):
    return lambda size: size.at_least(130)._replace(heads=2, head_dim=head_dim)


def name_of(case: Case) -> str:
    return f"{case.op} {case.detail}".strip()


# The losses' kernels are not Triton's, but a step with them is recorded and compiled as well.
CASES = {
    name_of(case): case
    for case in cases.CASES
    if ("triton" in dispatch.DECLARED[case.op].implementations and case.plain is not None)
    or case.op == "linear_masked_cross_entropy"
}
SHORT = "attention of short sequences"
# Attention's own tests interpret heads of other sizes.
ON_GPU_ONLY = {
    SHORT: replace(CASES["attention"], resize=cut),
    "attention with heads of 32": replace(CASES["attention"], resize=of_heads(32)),
    "attention with heads of 128": replace(CASES["attention"], resize=of_heads(128)),
}
EVERY = pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(n, marks=pytest.mark.gpu) for n in ON_GPU_ONLY)]
)
# A first case of each op, and the one with a further gradient. The other options of attention change neither the
# operator nor who adds what.
FIRST = {case.op: name for name, case in reversed(CASES.items())}
FIRST = {*FIRST.values(), "attention relative bias"}
EACH_OP = pytest.mark.parametrize(
    "name",
    [n if n in FIRST else pytest.param(n, marks=pytest.mark.gpu) for n in (*CASES, *ON_GPU_ONLY)],
)
CASES |= ON_GPU_ONLY


class Run(NamedTuple):
    """A case on a target's kernel."""

    case: Case
    impl: str
    size: Size
    dtypes: tuple[torch.dtype, ...]
    device: torch.device

    def draw(self, dtype: torch.dtype) -> Draw:
        return Draw(torch.default_generator, dtype, self.device)

    def inputs(self, dtype: torch.dtype, lengths: tuple[int, ...] | None = None) -> dict[str, Any]:
        return self.case.inputs(
            self.size._replace(lengths=lengths or self.size.lengths), self.draw(dtype)
        )

    def __call__(self, inputs: dict[str, Any]) -> Tensor:
        return self.case.run(inputs, self.impl)

    def both_ways(self, inputs: dict[str, Any], dout: Tensor) -> tuple[Tensor, ...]:
        return both_ways(self(inputs), inputs, dout)

    def upstream(self, inputs: dict[str, Any]) -> Tensor:
        return torch.randn_like(self(inputs))


def run_of(name: str, target, size: Size | None = None, *, short: bool = True) -> Run:
    """The losses take neither ``impl="triton"`` nor float16 in C++.

    Args: short: interpreted, the sequences stay short, also those of a case for long ones.
    """
    case = CASES[name]
    kernels = dispatch.DECLARED[case.op]
    usual = [d for d in target.dtypes if kernels.dtypes is None or d in kernels.dtypes]
    has_kernel = "triton" in kernels.implementations
    interpreted = target.device.type == "cpu"
    dtypes = tuple(usual) if has_kernel or not interpreted else (torch.float32,)
    size = size or size_of(target)
    if not (short and interpreted):
        size = case.resize(size)
    return Run(case, target.impl if has_kernel else "auto", size, dtypes, target.device)


def both_ways(out, inputs, dout):
    """The result and the gradient of every input that has one."""
    leaves = [v for v in inputs.values() if isinstance(v, Tensor) and v.requires_grad]
    if not leaves:
        return (out.detach(),)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))


# On a GPU also with width 1,024.
@pytest.mark.parametrize("heads", [12, pytest.param(16, marks=pytest.mark.gpu)])
@EVERY
def test_results_and_gradients_keep_the_budget(triton_target, name, heads):
    run = run_of(name, triton_target, size_of(triton_target, heads), short=False)
    for dtype in run.dtypes:
        draw = run.draw(dtype)
        inputs = run.case.inputs(run.size, draw)
        exact = draw.in_float64(inputs)
        dout = run.upstream(inputs)
        ours = run.both_ways(inputs, dout)
        plain, truth = (both_ways(run.case.plain(**each), each, dout) for each in (inputs, exact))
        # Its backward reads the log-sum-exp, which float32 rounds; plain PyTorch keeps the probabilities.
        rounded = 2 * torch.finfo(torch.float32).eps if name == "block_sparse_attention" else 0.0
        for place, triple in enumerate(zip(ours, plain, truth, strict=True)):
            assert_within_budget(*triple, f"{dtype} result {place}", rounded)


@pytest.mark.gpu  # the interpreter runs one program after another
@EVERY
def test_gradients_repeat_bit_for_bit(triton_target, name):
    run = run_of(name, triton_target)
    if run.case.op == "linear_masked_cross_entropy":
        pytest.skip("its sums are torch's products")
    for dtype in run.dtypes:
        inputs = run.inputs(dtype)
        dout = run.upstream(inputs)
        # The short kernels add up in one order without being asked.
        atomic = run.case.op in ("attention", "cross_attention", "global_window_attention")
        asked = atomic and (name != SHORT or dtype == torch.float32)
        with deterministic() if asked else nullcontext():
            first, second = (run.both_ways(inputs, dout) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), dtype


def test_fastenc_info_knows_which_ops_have_a_gpu_kernel():
    """By the names that users call."""
    x = torch.ones(1)
    reason = lambda op, impl: dispatch.unsupported_reason(op, impl, x, None, None)
    losses = {"masked_cross_entropy", "linear_masked_cross_entropy"}
    for name in ops.__all__:
        plain = name in losses | {
            "crf_decode_nbest",
            "linear_kl_divergence",
            "linear_segment_log_sum",
        }
        assert (reason(name, "triton") == "it has no Triton kernel") == plain, name
        assert (reason(name, "cuda") != "it has no CUDA kernel") == (name in losses), name


@EACH_OP
def test_registrations_pass_opcheck(triton_target, name):
    run = run_of(name, triton_target, TINY)
    inputs = run.inputs(run.dtypes[-1])
    dout = run.upstream(inputs)
    with OperatorCalls() as calls:
        run.both_ways(inputs, dout)
    assert calls.arguments
    for function, arguments in calls.arguments.items():
        # The padding of the CRF's table is neither written nor read, so two runs differ there.
        whole = function != torch.ops.fastenc.crf_fwd.default
        tests = DEFAULT_TEST_UTILS if whole else ("test_schema", "test_faketensor")
        torch.library.opcheck(function, *arguments, test_utils=tests)


# On a CPU. opcheck traces the operators of every op; a GPU compiles all of them.
COMPILED = {"attention", "attention grouped queries", "cross_attention", "layer_norm"}
COMPILED |= {"linear_masked_cross_entropy"}


@pytest.mark.parametrize(
    "name", [n if n in COMPILED else pytest.param(n, marks=pytest.mark.gpu) for n in CASES]
)
def test_torch_compile_full_graph_and_dynamic_shapes(triton_target, name):
    if name == "crf_marginals":
        pytest.skip("torch.compile does not trace the gradient that it takes")
    run, on_gpu = run_of(name, triton_target, TINY), triton_target.device.type == "cuda"
    torch.compiler.reset()  # graphs of other ops count as recompilations of this one
    backend = "inductor" if on_gpu else "aot_eager"
    compiled = compiled_once(run.case.run, backend)
    dtype = torch.float32 if torch.float32 in run.dtypes else run.dtypes[0]
    for lengths in (None, (*run.size.lengths[:1], 7, 2)):
        inputs = run.inputs(dtype, lengths)
        dout = run.upstream(inputs)
        results = compiled(inputs, run.impl), run(inputs)
        ours, expected = (both_ways(result, inputs, dout) for result in results)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def recorded(step, device):
    """The step's results, and a function that computes them again in place: a CUDA graph; on a CPU the step."""
    results = step()
    if device.type == "cpu":
        return results, lambda: [kept.copy_(new) for kept, new in zip(results, step(), strict=True)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return results, graph.replay


def tensors(inputs):
    """All tensors in the inputs, also those of a batch or of a plan; always in the same order."""
    for value in inputs.values():
        if isinstance(value, packing.PackedBatch):
            yield from (v for v in vars(value).values() if isinstance(v, Tensor))
        elif isinstance(value, tuple):
            yield from (v for v in value if isinstance(v, Tensor))
        elif isinstance(value, Tensor):
            yield value


@pytest.mark.gpu  # only there is a step recorded
@EVERY
def test_a_recorded_step_follows_values_and_lengths(triton_target, name):
    run, device = run_of(name, triton_target), triton_target.device
    lengths = run.size.lengths
    inputs, other = (run.inputs(run.dtypes[-1], each) for each in (lengths, lengths[::-1]))
    dout = run.upstream(inputs)
    results, replay = recorded(lambda: run.both_ways(inputs, dout), device)
    replay()  # the capture computes nothing
    before = [result.clone() for result in results]
    with torch.no_grad():
        for place, new in zip(tensors(inputs), tensors(other), strict=True):
            place.copy_(new)
    replay()
    # Atomic sums, and products of other shapes, differ by rounding.
    torch.testing.assert_close(results, run.both_ways(other, dout), rtol=1e-2, atol=1e-2)
    assert not torch.equal(before[0], results[0])


def in_uniform_probabilities(target, dtype, wrap=lambda function: function):
    """Attention whose values are unit vectors: the result is the mask, and so is the values' gradient."""
    length = 16
    qkv = torch.zeros(length, 3, 1, length, device=target.device, dtype=dtype)
    unit = torch.eye(length, device=target.device, dtype=dtype)
    qkv[:, 2, 0] = unit
    qkv.requires_grad_()
    cu_seqlens = offsets_of((length,)).to(target.device)
    attend = wrap(
        lambda qkv: ops.attention(qkv, cu_seqlens, length, dropout_p=0.5, impl=target.impl)
    )

    def step():
        out = attend(qkv)
        (gradient,) = torch.autograd.grad(out, qkv, unit[:, None])
        return out.detach()[:, 0], gradient[:, 2, 0].t()

    return step


def in_layer_norm(target, dtype, wrap=lambda function: function):
    """Ones, some of which are dropped: only the kept ones are above the mean and have a gradient."""
    x = torch.ones(4, 256, device=target.device, dtype=dtype, requires_grad=True)
    residual, dout = torch.zeros_like(x), torch.randn_like(x)
    weight = torch.ones(256, device=target.device, dtype=dtype)
    named = dict(residual=residual, dropout_p=0.5, impl=target.impl)
    normalize = wrap(lambda x: ops.layer_norm(x, weight, torch.zeros_like(weight), **named))

    def step():
        y = normalize(x)
        (gradient,) = torch.autograd.grad(y, x, dout)
        return y.detach(), gradient

    return step


def in_embedding(target, dtype, wrap=lambda function: function):
    """One token, with a gradient for the norm's bias where dropout keeps an element."""
    new = lambda *shape: torch.randn(*shape, device=target.device).to(dtype)
    ids = torch.zeros(1, dtype=torch.long, device=target.device)
    tables, weight, bias = [new(3, 256) for _ in range(3)], new(256), new(256).requires_grad_()
    named = {"position": tables[1], "token_type": tables[2], "position_ids": ids.clone()}
    named |= {"dropout_p": 0.5, "impl": target.impl}
    embed = wrap(lambda bias: ops.embedding_layer_norm(ids, tables[0], weight, bias, **named))

    def step():
        y = embed(bias)
        (gradient,) = torch.autograd.grad(y, bias, torch.ones_like(y))
        return y.detach()[0].abs(), gradient

    return step


WITH_DROPOUT = pytest.mark.parametrize(
    "op", [in_uniform_probabilities, in_layer_norm, in_embedding]
)


def assert_drops_others_each_time_and_the_same_in_its_backward(step):
    """step: () -> (result, gradient), each 0 or less for a dropped element."""
    kept = []
    for _ in range(3):
        result, gradient = step()
        forward, backward = result > 0, gradient != 0
        assert torch.equal(forward, backward)
        assert 0.3 < forward.float().mean() < 0.7
        kept.append(forward.clone())
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])


@WITH_DROPOUT
def test_dropout_of_a_recorded_step(triton_target, op):
    for dtype in triton_target.dtypes:
        step = op(triton_target, dtype)
        step()  # compile before recording
        results, replay = recorded(step, triton_target.device)

        def replayed(results=results, replay=replay):
            replay()
            return results

        assert_drops_others_each_time_and_the_same_in_its_backward(replayed)


@WITH_DROPOUT
def test_dropout_under_torch_compile(triton_target, op):
    torch.compiler.reset()
    backend = "inductor" if triton_target.device.type == "cuda" else "aot_eager"
    wrap = partial(torch.compile, fullgraph=True, dynamic=True, backend=backend)
    step = op(triton_target, torch.float32, wrap)
    assert_drops_others_each_time_and_the_same_in_its_backward(step)


@pytest.mark.parametrize("longest", [40, 140])
def test_the_order_of_sequences_does_not_matter(triton_target, longest):
    lengths = [longest, 3, 0, 17, 1]
    turned = list(reversed(lengths))
    for dtype in triton_target.dtypes:
        parts = [torch.randn(n, 3, 1, 16, device=triton_target.device).to(dtype) for n in lengths]
        results = []
        for order, sizes in ((parts, lengths), (parts[::-1], turned)):
            qkv = torch.cat(order).requires_grad_()
            out = ops.attention(
                qkv, offsets_of(sizes).to(qkv.device), longest, impl=triton_target.impl
            )
            (dqkv,) = torch.autograd.grad(out.float().square().sum(), qkv)
            results.append((out.split(sizes), dqkv.split(sizes)))
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        for ours, other in zip(*results, strict=True):
            for one, same in zip(ours, reversed(other), strict=True):
                torch.testing.assert_close(one, same, rtol=tolerance, atol=tolerance)
