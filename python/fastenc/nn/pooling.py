"""One vector a sequence from packed token vectors."""

import torch
from torch import Tensor

from fastenc.ops import segment_pool
from fastenc.ops.segment_pool import MODES as POOLINGS


def pool(hidden: Tensor, cu_seqlens: Tensor, pooling: str) -> Tensor:
    """CLS, mean or max of each sequence's tokens.

    Args:
        hidden: (total_tokens, hidden_size); cu_seqlens: int32 (batch+1,), no sequence empty.
        pooling: "cls" (the first token), "mean" or "max".
    Returns: (batch, hidden_size), hidden's dtype, as :func:`fastenc.ops.segment_pool` forms it.
    Raises: ValueError for another name or an empty sequence.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling must be one of {POOLINGS}, got {pooling!r}")
    # Values are read only on CPU tensors; on an accelerator that would wait for the device.
    reads = cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
    if reads and bool((cu_seqlens.diff() == 0).any()):
        raise ValueError(
            "an empty sequence has nothing to pool, got one at place "
            f"{int((cu_seqlens.diff() == 0).nonzero()[0])}: leave it out of the batch"
        )
    return segment_pool(hidden, cu_seqlens, pooling)
