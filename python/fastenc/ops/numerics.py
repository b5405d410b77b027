"""The numerics cases that the ops declare. A case computes an op at a small shape of real encoders, and the same in
plain PyTorch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LENGTHS = (5, 64, 33, 128)
LONG_LENGTHS = (5, 300, 33)  # too long for the kernels for short sequences
TOKENS = sum(LENGTHS)
LONGEST = max(LENGTHS)
WINDOW, FARTHEST = (
    64,
    32,
)  # tokens on each side; R, the largest distance in a table of relative biases


@dataclass(frozen=True)
class Case:
    """One op, computed by the library and by plain PyTorch.

    Fields:
        op: the op's name in ``fastenc.ops``.
        inputs: makes the arguments from a CPU generator. Floating-point tensors are cast to the dtype under test and
            differentiated; other values are passed unchanged, tensors on the device.
        ours, plain: called with the inputs by name; each returns one tensor of the same dtype. ``plain`` in float64 is
            the truth, so it must compute in float64 if its inputs are float64.
        detail: distinguishes several cases of one op.
    """

    op: str
    inputs: Callable[[torch.Generator], dict[str, Any]]
    ours: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    detail: str = ""


CASES: list[Case] = []


def numerics_case(
    op: str,
    inputs: Callable[[torch.Generator], dict[str, Any]],
    ours: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    detail: str = "",
) -> None:
    """Declare a case of the numerics report, see :class:`Case`."""
    CASES.append(Case(op, inputs, ours, plain, detail))


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def offsets(lengths: Sequence[int] = LENGTHS) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def packed_inputs(generator: torch.Generator) -> dict[str, Any]:
    return {"x": normal(generator, TOKENS, 384), "cu_seqlens": offsets()}


def labels(generator: torch.Generator, rows: int, vocabulary: int) -> Tensor:
    """int64 (rows,): class indices for 15 % of the rows; -100, which losses ignore, for the others."""
    drawn = torch.randint(vocabulary, (rows,), generator=generator)
    return drawn.where(torch.rand(rows, generator=generator) < 0.15, -100)


def rotary_inputs(generator: torch.Generator) -> dict[str, Any]:
    frequencies = 10000 ** -(torch.arange(32, dtype=torch.float64) / 32)
    angles = torch.arange(LONGEST, dtype=torch.float64)[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], 1).float()
    # A function, because tensors of floating point are cast to the dtype under test: a table stays in float32.
    return {
        "qkv": normal(generator, TOKENS, 3, 12, 64),
        "cu_seqlens": offsets(),
        "table": lambda like: table.to(like.device),
    }


def rotated(x: Tensor, table: Callable[[Tensor], Tensor]) -> Tensor:
    """Rotary position embedding in plain PyTorch."""
    cosine, sine = (
        torch.cat([columns[:length] for length in LENGTHS])[:, None].to(x.dtype)
        for columns in table(x).chunk(2, 1)
    )
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def distances(length: int, device: torch.device) -> Tensor:
    """j - i of query i and key j."""
    positions = torch.arange(length, device=device)
    return positions - positions[:, None]


def outside_window(device: torch.device, length: int) -> Tensor:
    """(length, length), to be added to the scores: -inf where key and query are more than WINDOW apart, else 0."""
    hidden = distances(length, device).abs() > WINDOW
    return torch.zeros(hidden.shape, device=device).masked_fill(hidden, float("-inf"))
