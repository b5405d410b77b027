"""Prepends learned rows to every sequence of a packed batch."""

import torch
from torch import Tensor


def prepend_rows(x: Tensor, cu_seqlens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Prepend the same ``rows`` to each sequence.

    Args:
        x: (total_tokens, ...).
        cu_seqlens: int32 (batch+1,), offsets of the sequences.
        rows: (P, ...), with x's other dimensions.
    Returns: the new batch (total_tokens + P * batch, ...), its cu_seqlens, and int64 (total_tokens,), the indices of
        x's rows in it.
    Differentiable: x, rows. Nothing is read back from the device.
    """
    tokens, batch, length = x.shape[0], cu_seqlens.shape[0] - 1, rows.shape[0]
    numbers = torch.arange(batch + 1, dtype=cu_seqlens.dtype, device=x.device)
    longer = cu_seqlens + length * numbers
    sequence = torch.repeat_interleave(numbers[:-1], cu_seqlens.diff(), output_size=tokens)
    kept = torch.arange(tokens, device=x.device) + length * (sequence.long() + 1)
    new = (longer[:-1, None] + torch.arange(length, device=x.device)).flatten()
    source = torch.cat([x, rows.to(x.dtype).expand(batch, *rows.shape).flatten(0, 1)])
    indices = torch.cat([kept, new])
    return source.new_empty(source.shape).index_copy(0, indices, source), longer, kept
