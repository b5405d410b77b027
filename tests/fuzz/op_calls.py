"""Random valid calls of every public op, made from the cases that the ops declare."""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from fastenc.ops.cases import Case, Draw, Size, first_cases
from fastenc.packing import PackedBatch, pack, pack_sequences
from tests.fuzz.extremes import EXTREMES

CASES = first_cases()
WIDTHS = (8, 16, 17, 24, 33, 64, 96, 130)


def lengths_of(rng: Random, most: int = 40) -> list[int]:
    return [rng.choice((0, 1, 2, rng.randint(1, most))) for _ in range(rng.randint(0, 5))]


def random_size(rng: Random) -> Size:
    lengths = tuple(lengths_of(rng, rng.choice((12, 40, 70))))
    return Size(
        lengths,
        width=rng.choice((*WIDTHS, 1000)),
        inner=rng.choice(WIDTHS),
        heads=rng.randint(1, 3),
        head_dim=rng.choice((8, 16, 32, 64)),
        vocabulary=rng.choice((1, 2, 9, 50, 100, 517)),
        max_seqlen=max(lengths, default=0) + rng.randint(0, 3),
    )


def batch_of(rng: Random, lengths: list[int] | None = None) -> PackedBatch:
    """Packed from lists, or from a padded batch with its real tokens anywhere."""
    lengths = lengths_of(rng, 12) if lengths is None else lengths
    rows = [[rng.randrange(50) for _ in range(n)] for n in lengths]
    if rng.random() < 0.5:
        return pack_sequences(rows)
    mask = torch.rand(len(rows), rng.randint(0, 12)) < rng.random()
    return pack(torch.randint(50, mask.shape), mask.long(), torch.zeros_like(mask).long())


class RandomDraw(Draw):
    """Draws any option, layout, leading dimensions and mixture of dtypes; values by torch's generator."""

    def __init__(self, rng: Random, dtype: torch.dtype):
        super().__init__(torch.default_generator, dtype)
        self.rng = rng

    def choice(self, usual, *others):
        return self.rng.choice((usual, *others))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.laid_out((self.random(*shape) * scale).to(self.dtype)).requires_grad_()

    def parameter(self, *shape: int, scale: float = 1.0) -> Tensor:
        dtype = self.rng.choice((self.dtype, torch.float32))
        return self.laid_out((self.random(*shape) * scale).to(dtype)).requires_grad_()

    def leading(self, rows: int) -> tuple[int, ...]:
        return tuple(self.rng.randint(0, 9) for _ in range(self.rng.randint(0, 2)))

    def batch(self, size: Size) -> PackedBatch:
        return batch_of(self.rng, list(size.lengths))

    def laid_out(self, x: Tensor) -> Tensor:
        """The same values in another layout."""
        layout = self.rng.choice(("rows", "rows", "strided", "columns", "slice"))
        if layout == "strided" and x.dim():
            return torch.stack([x, x + 1], dim=-1)[..., 0]
        if layout == "columns" and x.dim() > 1:
            return x.mT.contiguous().mT
        if layout == "slice" and x.dim():
            return torch.cat([x[:0].new_zeros(1, *x.shape[1:]), x])[1:]
        return x


@dataclass
class Call:
    """An op's arguments; ``draw`` knows which of them the truth has in float64."""

    case: Case
    arguments: dict[str, Any]
    draw: Draw


def random_call(op: str, rng: Random, *dtypes: torch.dtype) -> Call:
    draw = RandomDraw(rng, rng.choice(dtypes or (torch.float32, torch.float32, torch.bfloat16)))
    arguments = CASES[op].inputs(random_size(rng), draw)
    if op in EXTREMES and rng.random() < 0.2:
        with torch.no_grad():
            EXTREMES[op](rng, arguments)
    return Call(CASES[op], arguments, draw)
