"""Values at which rounding, overflow or ties show: what is put into some of an op's random calls."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch

Arguments = dict[str, Any]


def lowest_numbers(rng: Random, arguments: Arguments, elements: slice = slice(None)) -> None:
    """Some pre-activations are the lowest numbers, of which every activation is 0."""
    x = arguments["x"][..., elements]
    lowest = rng.choice((torch.finfo(x.dtype).min, -1e30, -3e19))
    x[torch.rand(x.shape) < 0.2] = lowest


def in_the_gate(rng: Random, arguments: Arguments) -> None:
    lowest_numbers(rng, arguments, slice(arguments["x"].shape[-1] // 2))


def rows_of_one_value(rng: Random, arguments: Arguments) -> None:
    """The rounding of a mean, which a small eps would show."""
    arguments["x"].fill_(rng.choice((0.1, -37.3, 12345.678)))
    arguments |= {"residual": None, "x_bias": None, "eps": 1e-12}


def large_scores(rng: Random, arguments: Arguments) -> None:
    """Scores that are large, exact in float32, and often equal; the lowest number hides some or all keys."""
    q, k = (
        arguments["qkv"].unbind(1)[:2] if "qkv" in arguments else (arguments["q"], arguments["k"])
    )
    magnitude = rng.choice((2.0**20, -(2.0**40), 2.0**60))
    step = max(1.0, 4 * abs(magnitude) * torch.finfo(torch.float32).eps)
    q.zero_()[..., 0], k.zero_()[..., 0] = 4 * magnitude, 1
    q[..., 1], k[..., 1] = 4 * step, torch.randint(-3, 4, k.shape[:2]).to(k.dtype)
    lowest = torch.full((len(k),), torch.finfo(torch.float32).min)
    some = torch.where(torch.rand(len(k)) < 0.5, lowest, 0.0)
    arguments |= {
        "softmax_scale": 0.25,
        "window_size": rng.choice(((-1, -1), (2, 3))),
        "alibi_slopes": None,
        "relative_bias": None,
        "key_bias": rng.choice((None, lowest, some)),
    }


EXTREMES: dict[str, Callable[[Random, Arguments], None]] = {
    "attention": large_scores,
    "cross_attention": large_scores,
    "layer_norm": rows_of_one_value,
    "bias_gelu": lowest_numbers,
    "bias_glu": in_the_gate,
}
