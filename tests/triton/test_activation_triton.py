"""The activations of the Triton kernels in float32, where no rounding of the storage type can hide errors."""

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from fastenc.kernels.activation import GELU, GELU_TANH, SILU, gate, slope  # noqa: E402


@triton.jit
def _evaluate_kernel(
    u_ptr, y_ptr, slope_ptr, BLOCK: tl.constexpr, KIND: tl.constexpr, NARROW: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u = tl.load(u_ptr + place)
    g = gate(u, KIND, NARROW)
    tl.store(y_ptr + place, u * g)
    tl.store(slope_ptr + place, slope(u, g, KIND, NARROW))


# The bounds in the docstring. float32's own erf is exact to a few rounding steps. A GPU's exp2 and rsqrt are
# approximations too, of 2^-22 and 2^-22.9 (PTX ISA, ex2 and rsqrt). For large arguments the gate is 1, and the slope
# multiplies its rounding error by 250.
@pytest.mark.parametrize(
    "narrow,bounds,gpu_bounds",
    [(True, (4e-6, 1.7e-5), (5e-6, 1e-4)), (False, (1.2e-6, 1e-6), (1.2e-6, 1e-6))],
)
def test_gelu_keeps_its_distance_from_the_erf_form(triton_target, narrow, bounds, gpu_bounds):
    if triton_target.device.type == "cuda":
        bounds = gpu_bounds
    u = torch.linspace(-12, 12, 64 * 1024, device=triton_target.device)
    y, dy = torch.empty_like(u), torch.empty_like(u)
    _evaluate_kernel[(64,)](u, y, dy, BLOCK=1024, KIND=GELU, NARROW=narrow)
    exact = u.double().requires_grad_()
    truth = F.gelu(exact)
    (truth_slope,) = torch.autograd.grad(truth.sum(), exact)
    assert (y - truth).abs().max() < bounds[0]
    assert (dy - truth_slope).abs().max() < bounds[1]


@pytest.mark.filterwarnings("ignore:(overflow|divide by zero):RuntimeWarning")
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("activation", [GELU, GELU_TANH, SILU], ids=["gelu", "gelu_tanh", "silu"])
def test_the_lowest_and_the_highest_number_have_their_limits(triton_target, activation, narrow):
    far = torch.tensor([50.0, 1e4, 3e19, 3.4e38])
    u = torch.cat([-far, far]).to(triton_target.device)
    y, dy = torch.empty_like(u), torch.empty_like(u)
    _evaluate_kernel[(1,)](u, y, dy, BLOCK=8, KIND=activation, NARROW=narrow)
    torch.testing.assert_close(y, u.clamp(min=0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dy, (u > 0).float(), rtol=0, atol=1e-6)
