"""Rows of all processes of a distributed run."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


def rows_of_all(rows: Tensor) -> Tensor:
    """The rows of this process, then those of the others in the order of the processes, with their gradient.

    Every process must call this, in the forward and in the backward. A row's gradient is the sum of what all processes
    pass back to it. The host waits for the numbers of rows.

    Args:
        rows: (rows, ...) of this process; the number of rows may differ between processes.
    Returns: (rows of all, ...), of the same dtype; without a distributed run the rows as they are.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows
    own = torch.tensor([rows.shape[0]], device=rows.device)
    counts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, own)
    numbers = torch.cat(counts).tolist()
    missing = max(numbers) - rows.shape[0]
    padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))
    gathered = _Gather.apply(padded)
    others = [n for n in range(len(numbers)) if n != dist.get_rank()]
    return torch.cat([rows, *(gathered[number, : numbers[number]] for number in others)])


class _Gather(Function):
    """Tensors of one shape from all processes, stacked."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total[dist.get_rank()]
