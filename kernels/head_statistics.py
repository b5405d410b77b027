"""What attention heads look at: entropy, mean distance, single probabilities and the strongest key of each query.

Tiling: one program is (block of BLOCK_M queries, head, sequence) and walks the keys BLOCK_N at a time with the running
maximum of the softmax; sums of e and e |j - i| are rescaled with it, sums of e s turn into the entropy at the end, and
the scores at the keys that are asked about are kept as they come. Nothing of size length x length is written.

Bytes: reads q once and k once a block of queries, writes 36 a query and head.
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor

COUNT = tl.constexpr(8)


@triton.jit
def _head_statistics_kernel(
    q_ptr,  # (total, heads, D) by strides
    k_ptr,
    cu_seqlens_ptr,  # (batch+1,), int32
    targets_ptr,  # (total,), int32
    statistics_ptr,  # (total, heads, COUNT), float32
    strongest_ptr,  # (total, heads), int32
    q_token,
    q_head,
    k_token,
    k_head,
    heads,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TARGETS: tl.constexpr,
    SKIP_ENDS: tl.constexpr,
):
    head = tl.program_id(1)
    first = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - first
    start_m = tl.program_id(0) * BLOCK_M
    if start_m >= length:
        return
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_m = offs_m < length
    mask_d = offs_d < D
    token = (first + offs_m).to(tl.int64)
    q_at = q_ptr + token[:, None] * q_token + head * q_head + offs_d[None, :]
    q = tl.load(q_at, mask=mask_m[:, None] & mask_d[None, :], other=0.0)
    target = tl.full([BLOCK_M], -1, tl.int32)
    if TARGETS:
        target = tl.load(targets_ptr + token, mask=mask_m, other=-1)
    begin, end = 0, length
    if SKIP_ENDS:
        begin = tl.where(length > 2, 1, 0)
        end = length - begin

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M], tl.float32)  # sum of e (s - highest)
    distance = tl.zeros([BLOCK_M], tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    strongest = tl.zeros([BLOCK_M], tl.int32) + begin
    s_first = tl.zeros([BLOCK_M], tl.float32)
    s_last = tl.zeros([BLOCK_M], tl.float32)
    s_self = tl.zeros([BLOCK_M], tl.float32)
    s_previous = tl.zeros([BLOCK_M], tl.float32)
    s_next = tl.zeros([BLOCK_M], tl.float32)
    s_target = tl.zeros([BLOCK_M], tl.float32)
    for start_n in tl.range(0, length, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < length
        k_at = (
            k_ptr
            + (first + offs_n).to(tl.int64)[None, :] * k_token
            + head * k_head
            + offs_d[:, None]
        )
        k = tl.load(k_at, mask=mask_n[None, :] & mask_d[:, None], other=0.0)
        s = tl.dot(q, k, input_precision="ieee").to(tl.float32) * scale
        away = offs_n[None, :] - offs_m[:, None]
        s_first += tl.sum(tl.where(offs_n[None, :] == 0, s, 0.0), 1)
        s_last += tl.sum(tl.where(offs_n[None, :] == length - 1, s, 0.0), 1)
        s_self += tl.sum(tl.where(away == 0, s, 0.0), 1)
        s_previous += tl.sum(tl.where(away == -1, s, 0.0), 1)
        s_next += tl.sum(tl.where((away == 1) & mask_n[None, :], s, 0.0), 1)
        if TARGETS:
            s_target += tl.sum(tl.where(offs_n[None, :] == target[:, None], s, 0.0), 1)
        # The strongest key; of equals the first.
        inside = (offs_n >= begin) & (offs_n < end)
        candidate = tl.where(inside[None, :], s, float("-inf"))
        top = tl.max(candidate, 1)
        reaches = inside[None, :] & (candidate == top[:, None])
        place = tl.min(tl.where(reaches, offs_n[None, :], 2147483647), 1)
        strongest = tl.where(top > best, place, strongest)
        best = tl.maximum(best, top)
        # The softmax so far.
        s = tl.where(mask_n[None, :], s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        drop = tl.where(highest == float("-inf"), 0.0, highest - higher)
        rescale = tl.exp(drop)
        e = tl.exp(s - higher[:, None])
        weighted = rescale * (weighted + drop * total)
        weighted += tl.sum(e * tl.where(mask_n[None, :], s - higher[:, None], 0.0), 1)
        total = rescale * total + tl.sum(e, 1)
        distance = rescale * distance + tl.sum(e * tl.abs(away).to(tl.float32), 1)
        highest = higher

    out = statistics_ptr + (token * heads + head) * COUNT
    tl.store(out, tl.log(total) - weighted / total, mask=mask_m)
    tl.store(out + 1, distance / total, mask=mask_m)
    tl.store(out + 2, tl.exp(s_first - highest) / total, mask=mask_m)
    tl.store(out + 3, tl.exp(s_last - highest) / total, mask=mask_m)
    tl.store(out + 4, tl.exp(s_self - highest) / total, mask=mask_m)
    previous = tl.where(offs_m > 0, tl.exp(s_previous - highest) / total, 0.0)
    tl.store(out + 5, previous, mask=mask_m)
    following = tl.where(offs_m + 1 < length, tl.exp(s_next - highest) / total, 0.0)
    tl.store(out + 6, following, mask=mask_m)
    tl.store(out + 7, tl.where(target >= 0, tl.exp(s_target - highest) / total, 0.0), mask=mask_m)
    tl.store(strongest_ptr + token * heads + head, strongest, mask=mask_m)


def config(head_dim: int, itemsize: int) -> dict:
    """Launch parameters; not tuned on a device yet. A block of scores fits the registers of 4 warps. Float32 products,
    without matrix instructions, hold their operands there, too.
    """
    if itemsize == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 16 if head_dim > 64 else 32, "num_warps": 4}
    return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4}


def head_statistics(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    targets: Tensor | None,
    max_seqlen: int,
    scale: float,
    skip_ends: bool,
) -> tuple[Tensor, Tensor]:
    """(statistics float32 (total, heads, 8), strongest int32 (total, heads))."""
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    cu_seqlens = cu_seqlens.contiguous()
    total, heads, dim = q.shape
    statistics = q.new_empty((total, heads, COUNT.value), dtype=torch.float32)
    strongest = q.new_empty((total, heads), dtype=torch.int32)
    if strongest.numel():
        launch = config(dim, q.element_size())
        grid = (triton.cdiv(max_seqlen, launch["BLOCK_M"]), heads, cu_seqlens.shape[0] - 1)
        run(
            _head_statistics_kernel,
            grid,
            q,
            k,
            cu_seqlens,
            cu_seqlens if targets is None else targets.contiguous(),
            statistics,
            strongest,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            heads,
            scale,
            D=dim,
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            TARGETS=targets is not None,
            SKIP_ENDS=skip_ends,
            **launch,
        )
    return statistics, strongest
