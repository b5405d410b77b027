"""Derivatives that the kernels do not compute: the references compute them, or an error says so."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastenc
from fastenc.models import Encoder, EncoderConfig
from fastenc.ops.cases import CASES, Draw, Size
from fastenc.packing import pack_sequences
from tests.helpers.extension import needs_cpp

pytestmark = needs_cpp
SIZE = Size(lengths=(5, 1, 9), width=32, inner=48, heads=2, head_dim=16, vocabulary=40)
# PyTorch has no forward mode of the sum over segments, and says so.
NO_FORWARD_MODE = ("segment_pool", "")
# An op by its implementation, one by its products, one with a block at a time.
COMPILED = ("bias_gelu", "linear_gelu", "linear_segment_log_sum")
COPIES = ("pack", "unpack")  # their gradients are differentiable


def is_differentiable(case):
    inputs = case.inputs(case.resize(SIZE), Draw(torch.Generator()))
    leaves = [v for v in inputs.values() if isinstance(v, Tensor) and v.requires_grad]
    return case.plain is not None and bool(leaves)


DIFFERENTIABLE = [
    pytest.param(case, id=f"{case.op} {case.detail}".strip())
    for case in filter(is_differentiable, CASES)
]


def functions(case):
    """(the op, plain PyTorch, the inputs that have a gradient); both functions take these inputs."""
    inputs = case.inputs(case.resize(SIZE), Draw(torch.Generator().manual_seed(0)))
    names = [n for n, v in inputs.items() if isinstance(v, Tensor) and v.requires_grad]
    fixed = {n: v for n, v in inputs.items() if n not in names}

    def plain(*values):
        with sdpa_kernel(SDPBackend.MATH):  # the others have no forward mode
            return case.plain(**fixed, **dict(zip(names, values, strict=True)))

    ours = lambda *values: case.run(fixed | dict(zip(names, values, strict=True)))
    return ours, plain, tuple(inputs[name].detach() for name in names)


def assert_near(ours, plain):
    """Within 1e-5 of the largest value."""
    atol = 1e-5 * max(1, float(plain.abs().max()))
    # Forward mode widens some scalars to float64.
    torch.testing.assert_close(ours, plain, rtol=0, atol=atol, check_dtype=False)


@pytest.mark.parametrize("case", DIFFERENTIABLE)
@pytest.mark.parametrize("gradients", [True, False])
def test_forward_mode(case, gradients):
    ours, plain, values = functions(case)
    tangents = tuple(map(torch.randn_like, values))
    if (case.op, case.detail) == NO_FORWARD_MODE:
        with pytest.raises(NotImplementedError, match="segment_reduce"):
            torch.func.jvp(ours, values, tangents)
        return
    with torch.set_grad_enabled(gradients):
        _, along = torch.func.jvp(ours, values, tangents)
    assert_near(along, torch.func.jvp(plain, values, tangents)[1])


@pytest.mark.parametrize("case", DIFFERENTIABLE)
def test_gradients_of_functions(case):
    ours, plain, values = functions(case)
    gradients, expected = (
        torch.func.grad(lambda *given, f=f: f(*given).pow(3).sum(), tuple(range(len(values))))(
            *values
        )
        for f in (ours, plain)
    )
    for one, other in zip(gradients, expected, strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("case", [c for c in DIFFERENTIABLE if c.values[0].op in COMPILED])
def test_compiled_gradients_of_functions(case):
    ours, plain, values = functions(case)
    torch.compiler.reset()
    loss = lambda f: lambda *given: f(*given).pow(3).sum()
    compiled = torch.compile(torch.func.grad(loss(ours)), backend="eager", fullgraph=True)
    assert_near(compiled(*values), torch.func.grad(loss(plain))(*values))


@pytest.mark.parametrize("case", [c for c in DIFFERENTIABLE if c.values[0].op not in COPIES])
def test_second_derivatives_are_refused(case):
    """PyTorch's own decorator would leave them out of ``torch.autograd.grad`` and say nothing."""
    ours, _, values = functions(case)
    values = [value.requires_grad_() for value in values]
    loss = ours(*values).square().sum()
    with pytest.raises(RuntimeError, match="no second derivatives, got a backward with create_g"):
        torch.autograd.grad(loss, values, create_graph=True, allow_unused=True)


def test_a_kernel_that_was_asked_for_is_refused():
    x = torch.randn(3, 8)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="through the reference alone"):
        fastenc.ops.layer_norm(forward_ad.make_dual(x, x), impl="cpp")


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_an_encoder(gradients, frozen):
    """The directional derivative is that of the gradient, and a difference quotient's in float64."""
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(97, 32, 2, 2, 64, 64)).eval()
    batch = pack_sequences([[5, 6, 7, 8], [9, 10]])
    loss = lambda values: torch.func.functional_call(encoder, values, (batch,)).pooled.pow(3).sum()
    values = {name: p.detach() for name, p in encoder.named_parameters()}
    tangents = {name: torch.randn_like(p) for name, p in values.items()}
    loss(dict(encoder.named_parameters())).backward()
    expected = sum((p.grad * tangents[name]).sum() for name, p in encoder.named_parameters())
    if frozen:
        fastenc.freeze(encoder)
    with torch.set_grad_enabled(gradients):
        _, along = torch.func.jvp(loss, (values,), (tangents,))
    torch.testing.assert_close(along, expected, rtol=1e-4, atol=1e-4)
    if gradients:
        for name, gradient in torch.func.grad(loss)(values).items():
            assert_near(gradient, encoder.get_parameter(name).grad)
