"""A call with one changed argument is refused with a ValueError or TypeError, or computes what its arguments say.

The changed argument has the right type. The call never ends the process, never reads outside its inputs, and never
fails inside torch with an error that names no argument.
"""

from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.op_calls import Call
from tests.fuzz.valid_calls import check

REFUSED = (ValueError, TypeError, NotImplementedError)


def spoilt_tensor(x: Tensor, rng: Random) -> Tensor:
    """A tensor of another shape, dtype or device, or with another value."""
    ways = ["dtype", "deeper", "flat", "device", "longer"]
    if x.dim() and x.shape[0]:
        ways += ["shorter", "empty"]
    if x.numel() and not x.is_floating_point() and x.dtype != torch.bool:
        ways += ["value"] * 4
    way = rng.choice(ways)
    if way == "dtype":
        return x.to(
            rng.choice((torch.int64, torch.int32, torch.bool, torch.float64, torch.complex64))
        )
    if way == "deeper":
        return x.unsqueeze(rng.randint(0, x.dim()))
    if way == "flat":
        return x.flatten() if x.dim() != 1 else x.sum()
    if way == "device":
        return x.to("meta")
    if way == "longer":
        axis = rng.randrange(x.dim()) if x.dim() else 0
        return torch.cat([x, x], axis) if x.dim() else x.expand(2)
    if way == "shorter":
        return x[:-1]
    if way == "empty":
        return x[:0]
    spoilt = x.clone()
    spoilt.view(-1)[rng.randrange(x.numel())] = rng.choice((-1, -7, 1000, 2**31 - 1, -(2**31)))
    return spoilt


def spoilt(value: Any, rng: Random) -> Any:
    if torch.is_tensor(value):
        return spoilt_tensor(value, rng)
    if isinstance(value, str):
        return rng.choice(("", "other"))
    if isinstance(value, bool):
        return value
    if isinstance(value, tuple):
        return rng.choice(((-2, 1), (1, -7), (2**40, 2**40)))
    if isinstance(value, int):
        return rng.choice((-1, -(2**31), 2**40, 0, 1))
    if isinstance(value, float):
        return rng.choice((-1.0, float("nan"), float("inf"), 1.0, 0.0))
    return torch.randn(3)  # for an optional tensor that was left out


def check_refused(valid_call: Call, rng: Random) -> None:
    kept = ("batch", "softmax_scale")  # every value of a scale is valid
    name = rng.choice([name for name in valid_call.arguments if name not in kept])
    arguments = {**valid_call.arguments, name: spoilt(valid_call.arguments[name], rng)}
    if name.endswith("_idx") and torch.is_tensor(arguments[name]):
        arguments[name] = rng.choice((-1, 10**6))
    broken = replace(valid_call, arguments=arguments)
    try:
        result = valid_call.case.ours(**arguments)
    except REFUSED as error:
        assert str(error), f"{name}: an error without a message"
        return
    except Exception as error:
        shown = arguments[name]
        if torch.is_tensor(shown):
            shown = f"{shown.dtype} {tuple(shown.shape)} on {shown.device}"
        raise AssertionError(f"{name} = {shown}: {type(error).__name__}: {error}") from error
    if any(t.device.type == "meta" for t in [*arguments.values()] if torch.is_tensor(t)):
        tensors = [result] if torch.is_tensor(result) else [t for t in result if torch.is_tensor(t)]
        assert all(t.device.type == "meta" for t in tensors), (
            f"{name} on another device was accepted"
        )
        return
    check(broken, rng)
