"""Ops compared forward and backward, against the same op in float64."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import _compare
from benchmarks._compare import Prepared
from benchmarks._device import ON_GPU
from fastenc.profiling import Work

# Largest ||result - truth|| / ||truth||. A wrong formula is far above, the rounding of a few operations below.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class Provider(NamedTuple):
    """An op as a library offers it: a call with gradients, and the change of its layout to the truth's."""

    forward: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    dout: Tensor
    to_truth: Callable[[Tensor], Tensor] = lambda tensor: tensor


def compare_op(
    name: str,
    providers: dict[str, Provider | str],
    truth: Provider,
    *,
    baseline: str,
    forward: Work,
    backward: Work,
    checked: bool = True,
) -> dict[str, dict]:
    """Cases "name, forward", on a GPU also "name, backward", and "name, forward + backward".

    Args:
        truth: the same op in float64; returns the gradients of its own inputs, in the providers' order.
        forward, backward: the least work of each direction.
        checked: False for an op with random results, which only have to be finite.
    """
    exact_out = truth.forward()
    exact = (exact_out.detach(), *torch.autograd.grad(exact_out, truth.inputs, truth.dout))
    tolerance = TOLERANCES[forward.dtype]

    def check(provider: str, result) -> str | None:
        convert = providers[provider].to_truth
        results = (result,) if isinstance(result, Tensor) else result
        against = exact[:1] if isinstance(result, Tensor) else exact[1:]
        for index, (value, true) in enumerate(zip(results, against, strict=True)):
            value = convert(value).double()
            error = ((value - true).norm() / true.norm()).item() if checked else value.sum().item()
            if not (error < tolerance if checked else math.isfinite(error)):
                what = "result" if isinstance(result, Tensor) else f"gradient {index}"
                return f"{what}: relative error {error:.2g}" if checked else f"{what}: not finite"
        return None

    def both(provider: Provider):
        return torch.autograd.grad(provider.forward(), provider.inputs, provider.dout)

    def backward_alone(provider: Provider):
        return Prepared(
            provider.forward, lambda out: torch.autograd.grad(out, provider.inputs, provider.dout)
        )

    directions = {"forward": (lambda p: p.forward, forward)}
    if ON_GPU:
        directions["backward"] = (backward_alone, backward)
    directions["forward + backward"] = (lambda p: lambda: both(p), forward + backward)
    cases = {}
    for direction, (make, work) in directions.items():
        calls = {n: p if isinstance(p, str) else make(p) for n, p in providers.items()}
        with torch.no_grad() if direction == "forward" else nullcontext():
            cases[f"{name}, {direction}"] = _compare.compare(
                calls, baseline=baseline, check=check, work=work
            )
    return cases


def compare_functions(
    name: str,
    functions: dict[str, Callable[..., Tensor] | str],
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    *,
    baseline: str = "eager",
    forward: Work,
    backward: Work,
    checked: bool = True,
) -> dict[str, dict]:
    """:func:`compare_op` for functions with the same inputs; the truth is the baseline in float64."""
    wide = tuple(value.detach().double().requires_grad_() for value in inputs)
    providers = {
        key: f if isinstance(f, str) else Provider(lambda f=f: f(*inputs), inputs, dout)
        for key, f in functions.items()
    }
    truth = Provider(lambda: functions[baseline](*wide), wide, dout.double())
    works = {"forward": forward, "backward": backward}
    return compare_op(name, providers, truth, baseline=baseline, checked=checked, **works)
