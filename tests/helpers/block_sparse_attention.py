"""Inputs and the peer of the tests of block-sparse attention."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastenc.ops.block_sparse_attention import BlockPlan
from tests.helpers.attention_cases import offsets_of


class Inputs(NamedTuple):
    """qkv is the leaf. seen: for each plan and sequence int (blocks, blocks), how often a row names a block."""

    qkv: Tensor
    seen: list[list[Tensor]]
    lengths: tuple[int, ...]
    block_size: int

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "Inputs":
        return self._replace(qkv=self.qkv.detach().to(device, dtype).requires_grad_())

    def plan(self) -> BlockPlan:
        total = sum(self.lengths) // self.block_size + len(self.lengths)
        rows: list[list[tuple[int, int]]] = [[] for _ in range(total * len(self.seen))]
        first = 0
        for s, length in enumerate(self.lengths):
            for p, of_plan in enumerate(self.seen):
                for i, row in enumerate(of_plan[s]):
                    entries = [(j, int(count)) for j, count in enumerate(row) if count]
                    rows[p * total + first // self.block_size + s + i] = entries
            first += length
        flat = [entry for row in rows for entry in row] + [(-7, 0)]  # the last is unused
        columns, counts = (torch.tensor(values).int() for values in zip(*flat, strict=True))
        starts = torch.tensor([0, *map(len, rows)]).cumsum(0).int()
        return BlockPlan(*(x.to(self.qkv.device) for x in (starts, columns, counts)))

    def arguments(self) -> dict:
        """The arguments of the public function."""
        return {
            "qkv": self.qkv,
            "cu_seqlens": offsets_of(self.lengths).to(self.qkv.device),
            "max_seqlen": max(self.lengths, default=0),
            "plan": self.plan(),
            "block_size": self.block_size,
        }


def inputs_of(lengths, heads, dim, block_size, plans=1, dtype=torch.float32) -> Inputs:
    """Random plans; block 0 sees all, and the last block of queries of a long sequence sees nothing."""
    seen = []
    for _ in range(plans):
        of_plan = []
        for length in lengths:
            blocks = -(-length // block_size)
            counts = torch.randint(-2, 3, (blocks, blocks)).clamp(min=0)
            counts[:1] = 1
            if blocks > 3:
                counts[-1] = 0
            of_plan.append(counts)
        seen.append(of_plan)
    qkv = torch.randn(sum(lengths), 3, heads, dim).to(dtype).requires_grad_()
    return Inputs(qkv, seen, tuple(lengths), block_size)


def plain(inputs: Inputs) -> Tensor:
    """A sequence at a time: PyTorch's own attention, with the logarithms of the counts as its mask."""
    outputs, size = [], inputs.block_size
    for s, part in enumerate(inputs.qkv.split(list(inputs.lengths))):
        q, k, v = part.permute(1, 2, 0, 3).unbind(0)  # each (heads, length, dim)
        counts = torch.stack([of_plan[s] for of_plan in inputs.seen])
        counts = counts.repeat_interleave(size, 1).repeat_interleave(size, 2)
        mask = counts[:, : len(part), : len(part)].to(part.dtype).log()
        blind = (counts == 0).all(2)[:, : len(part), None]
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(
                q[None], k[None], v[None], mask.masked_fill(blind, 0.0).expand(len(q), -1, -1)
            )[0]
        outputs.append(out.masked_fill(blind, 0.0).transpose(0, 1))
    return torch.cat(outputs)
