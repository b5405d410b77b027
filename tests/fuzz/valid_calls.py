"""A valid call gives the results and gradients of its definition in float64, and changes no input."""

from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.op_calls import Call

# Relative to the largest value, or to 1: tells a wrong formula from rounding. Other tests check the budgets.
TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 0.08}


def tensors_of(result: Any) -> list[Tensor]:
    return [result] if torch.is_tensor(result) else [t for t in result if torch.is_tensor(t)]


def leaves_of(call: Call, dtype: torch.dtype | None) -> dict[str, Any]:
    """The arguments; floating-point tensors become leaves that require gradients, in their layouts."""
    made = {}
    for name, value in call.arguments.items():
        if torch.is_tensor(value) and value.is_floating_point():
            value = value.detach() if dtype is None else value.detach().to(dtype)
            value = value.requires_grad_(call.leaves is None or name in call.leaves)
        made[name] = value
    return made


def gradients(results: list[Tensor], arguments: dict[str, Any], ways: list[Tensor]) -> list[Tensor]:
    taken = [(y, way.to(y.dtype)) for y, way in zip(results, ways, strict=True) if y.requires_grad]
    leaves = [v for v in arguments.values() if torch.is_tensor(v) and v.requires_grad]
    if not taken or not leaves:
        return [torch.zeros_like(leaf) for leaf in leaves]
    ys, dys = zip(*taken, strict=True)
    return list(torch.autograd.grad(ys, leaves, dys, allow_unused=True, materialize_grads=True))


def assert_near(found: list[Tensor], exact: list[Tensor], tolerance: float, what: str) -> None:
    assert len(found) == len(exact), f"{what}: {len(found)} results, expected {len(exact)}"
    for number, (one, two) in enumerate(zip(found, exact, strict=True)):
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


def check(call: Call, rng: Random) -> None:
    before = {k: v.clone() for k, v in call.arguments.items() if torch.is_tensor(v)}
    seed = rng.getrandbits(60)
    results, grads = [], []
    for function, dtype in ((call.op, None), (call.truth, torch.float64)):
        arguments = leaves_of(call, dtype)
        torch.manual_seed(seed)  # for dropout's masks
        result = tensors_of(call.compare(function(**arguments)))
        if not results:
            ways = [torch.randn(y.shape) for y in result]
        results.append(result)
        grads.append(gradients(result, arguments, ways))
    tolerance = coarsest(call.arguments)
    assert_near(*results, tolerance, "result")
    assert_near(*grads, tolerance, "gradient")
    for name, value in before.items():
        assert torch.equal(call.arguments[name], value), f"{name} was changed"
