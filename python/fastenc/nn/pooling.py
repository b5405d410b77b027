"""One vector a sequence from packed token vectors."""

import torch
from torch import Tensor

POOLINGS = ("cls", "mean", "max")


def pool(hidden: Tensor, cu_seqlens: Tensor, pooling: str) -> Tensor:
    """CLS, mean or max of each sequence's tokens.

    Args:
        hidden: (total_tokens, hidden_size); cu_seqlens: int32 (batch+1,), no sequence empty.
        pooling: "cls" (the first token), "mean" or "max".
    Returns: (batch, hidden_size), hidden's dtype; the mean is formed in at least float32.
    Raises: ValueError for another name or an empty sequence.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling must be one of {POOLINGS}, got {pooling!r}")
    offsets = cu_seqlens.long()
    lengths = offsets.diff()
    # Values are read only on CPU tensors; on an accelerator that would wait for the device.
    reads = cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
    if reads and bool((lengths == 0).any()):
        raise ValueError(
            f"an empty sequence has nothing to pool, got one at place {int((lengths == 0).nonzero()[0])}: "
            "leave it out of the batch"
        )
    if pooling == "cls":
        return hidden.index_select(0, offsets[:-1])
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    pooled = torch.segment_reduce(wide, pooling, lengths=lengths, axis=0, unsafe=not reads)
    return pooled.to(hidden.dtype)
