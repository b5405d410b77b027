"""A valid call gives the results and gradients of its definition in float64, and changes no input."""

from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.op_calls import Call

# Relative to the largest value, or to 1: tells a wrong formula from rounding. Other tests check the budgets.
TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 0.08}


def gradients(result: Tensor, arguments: dict[str, Any], way: Tensor) -> list[Tensor]:
    leaves = [v for v in arguments.values() if torch.is_tensor(v) and v.requires_grad]
    if not leaves or not result.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    options = {"allow_unused": True, "materialize_grads": True}
    return list(torch.autograd.grad(result, leaves, way.to(result.dtype), **options))


def assert_near(results: list[Tensor], exact: list[Tensor], tolerance: float, what: str) -> None:
    assert len(results) == len(exact), f"{what}: {len(results)} results, expected {len(exact)}"
    for number, (one, two) in enumerate(zip(results, exact, strict=True)):
        assert one.shape == two.shape, f"{what} {number}: {one.shape}, expected {two.shape}"
        if not one.is_floating_point():
            assert torch.equal(one, two), f"{what} {number} differ"
            continue
        one, two = one.detach().double(), two.detach().double()
        finite = two[two.isfinite()]
        allowed = tolerance * max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)
        torch.testing.assert_close(
            one,
            two,
            rtol=0,
            atol=allowed,
            equal_nan=True,
            msg=lambda m, n=number: f"{what} {n}: {m}",
        )


def coarsest(arguments: dict[str, Any]) -> float:
    dtypes = {v.dtype for v in arguments.values() if torch.is_tensor(v)}
    return max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=0.0)


def check(valid_call: Call, rng: Random) -> None:
    before = {k: v.detach().clone() for k, v in valid_call.arguments.items() if torch.is_tensor(v)}
    seed = rng.getrandbits(60)
    results, grads = [], []
    exact = valid_call.draw.in_float64(valid_call.arguments)
    for arguments, impl in ((valid_call.arguments, "auto"), (exact, "reference")):
        torch.manual_seed(seed)  # for dropout's masks
        result = valid_call.case.run(arguments, impl)
        if not results:
            way = torch.randn(result.shape)
        results.append([result])
        grads.append(gradients(result, arguments, way))
    tolerance = coarsest(valid_call.arguments)
    assert_near(*results, tolerance, "result")
    assert_near(*grads, tolerance, "gradient")
    for name, value in before.items():
        assert torch.equal(valid_call.arguments[name], value), f"{name} was changed"
