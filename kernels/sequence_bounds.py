"""Where each token's sequence begins and ends.

Tiling: one program takes BLOCK tokens, and finds the sequence of each by a binary search in the offsets.
"""

import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit(do_not_specialize=["total_tokens", "batch", "steps", "max_seqlen"])
def _sequence_bounds_kernel(
    cu_seqlens_ptr,  # (batch+1,), int32
    bounds_ptr,  # (2, total_tokens), int32: where the token's sequence begins and ends
    total_tokens,
    batch,
    steps,  # 2 ** steps > batch
    max_seqlen,
    BLOCK: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < total_tokens
    low = tl.zeros([BLOCK], tl.int32)  # a sequence that begins at or before the token
    high = low + batch  # one that begins behind it
    for _ in tl.range(0, steps):
        middle = (low + high) // 2
        before = tl.load(cu_seqlens_ptr + middle) <= tokens
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    start, end = tl.load(cu_seqlens_ptr + low), tl.load(cu_seqlens_ptr + low + 1)
    tl.device_assert(end - start <= max_seqlen, "a sequence is longer than max_seqlen", mask=mask)
    tl.device_assert(tokens < end, "cu_seqlens ends before the last token", mask=mask)
    tl.store(bounds_ptr + tokens, start, mask=mask)
    tl.store(bounds_ptr + total_tokens + tokens, end, mask=mask)


def sequence_bounds(cu_seqlens: Tensor, total_tokens: int, max_seqlen: int) -> Tensor:
    """(2, total_tokens), int32: the begin and the end of each token's sequence."""
    cu_seqlens, batch = cu_seqlens.contiguous(), cu_seqlens.shape[0] - 1
    bounds = cu_seqlens.new_empty((2, total_tokens))
    if total_tokens:
        run(
            _sequence_bounds_kernel,
            (triton.cdiv(total_tokens, 256),),
            cu_seqlens,
            bounds,
            total_tokens,
            batch,
            batch.bit_length(),
            max_seqlen,
            BLOCK=256,
            num_warps=4,
        )
    return bounds
