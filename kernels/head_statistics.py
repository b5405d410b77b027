"""Statistics of attention probabilities: entropy, mean distance, single probabilities and each query's strongest key.

Tiling: one program is (block of BLOCK_M queries of a sequence, head). It reads the keys BLOCK_N at a time with the
running row maximum m of the softmax, e = exp(s - m). The sums of e, of e |j - i| and of e (s - m) are rescaled when m
grows; the last of them gives the entropy at the end. The scores of single keys ([CLS], neighbours, target) are kept
when they come. Nothing of size length x length is written.

Bytes: reads q once and k once for each block of queries, writes 36 for each query and head.
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor

COUNT = tl.constexpr(8)


@triton.jit(do_not_specialize=["blocks", "left", "right", "span"])
def _head_statistics_kernel(
    q_ptr,  # (tokens, heads, D) by strides
    k_ptr,
    cu_seqlens_ptr,  # (batch+1,), int32
    targets_ptr,  # (tokens,), int32
    relative_ptr,  # (heads, 2 * span + 1), float32, or None
    statistics_ptr,  # (tokens, heads, COUNT), float32
    strongest_ptr,  # (tokens, heads), int32
    q_token,
    q_head,
    k_token,
    k_head,
    heads,
    blocks,  # of the longest sequence
    scale,
    span,
    left,
    right,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TARGETS: tl.constexpr,
    SKIP_ENDS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    # Sequences lie on the grid's first axis, because only that is longer than 65,535.
    sequence, head = tl.program_id(0) // blocks, tl.program_id(1)
    first = tl.load(cu_seqlens_ptr + sequence)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - first
    tl.device_assert(length <= blocks * BLOCK_M, "a sequence is longer than max_seqlen")
    start_m = tl.program_id(0) % blocks * BLOCK_M
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
    # The keys that each query sees, and those among which its strongest is looked for.
    seen_begin, seen_end = offs_m * 0, offs_m * 0 + length
    begin_n, end_n = 0, length
    if WINDOW:
        query = tl.minimum(offs_m, length - 1)  # rows past the end see a key, too
        seen_begin = tl.maximum(query - left, 0)
        seen_end = tl.minimum(query + right + 1, length)
        begin_n = tl.maximum(start_m - left, 0) // BLOCK_N * BLOCK_N
        end_n = tl.minimum(start_m + BLOCK_M + right, length)
    begin, end = seen_begin, seen_end
    if SKIP_ENDS:
        inner_begin, inner_end = tl.maximum(begin, 1), tl.minimum(end, length - 1)
        has_inner = inner_begin < inner_end
        begin = tl.where(has_inner, inner_begin, begin)
        end = tl.where(has_inner, inner_end, end)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M], tl.float32)  # sum of e (s - highest)
    distance = tl.zeros([BLOCK_M], tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    strongest = begin
    s_first = tl.zeros([BLOCK_M], tl.float32)
    s_last = tl.zeros([BLOCK_M], tl.float32)
    s_self = tl.zeros([BLOCK_M], tl.float32)
    s_previous = tl.zeros([BLOCK_M], tl.float32)
    s_next = tl.zeros([BLOCK_M], tl.float32)
    s_target = tl.zeros([BLOCK_M], tl.float32)
    for start_n in tl.range(begin_n, end_n, BLOCK_N):
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
        if relative_ptr is not None:
            index = tl.minimum(tl.maximum(away, -span), span) + span
            s += tl.load(relative_ptr + head * (2 * span + 1) + index)
        s_first += tl.sum(tl.where(offs_n[None, :] == 0, s, 0.0), 1)
        s_last += tl.sum(tl.where(offs_n[None, :] == length - 1, s, 0.0), 1)
        s_self += tl.sum(tl.where(away == 0, s, 0.0), 1)
        s_previous += tl.sum(tl.where(away == -1, s, 0.0), 1)
        s_next += tl.sum(tl.where((away == 1) & mask_n[None, :], s, 0.0), 1)
        if TARGETS:
            s_target += tl.sum(tl.where(offs_n[None, :] == target[:, None], s, 0.0), 1)
        # The strongest key; of equals the first.
        inside = (offs_n[None, :] >= begin[:, None]) & (offs_n[None, :] < end[:, None])
        candidate = tl.where(inside, s, float("-inf"))
        top = tl.max(candidate, 1)
        reaches = inside & (candidate == top[:, None])
        first_key = tl.min(tl.where(reaches, offs_n[None, :], 2147483647), 1)
        strongest = tl.where(top > best, first_key, strongest)
        best = tl.maximum(best, top)
        # The softmax so far.
        visible = mask_n[None, :]
        if WINDOW:
            visible = (offs_n[None, :] >= seen_begin[:, None]) & (
                offs_n[None, :] < seen_end[:, None]
            )
        s = tl.where(visible, s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # not inf - inf
        drop = tl.where(highest == float("-inf"), 0.0, highest - finite)
        rescale = tl.exp(drop)
        below = s - finite[:, None]
        e = tl.exp(below)
        weighted = rescale * (weighted + drop * row_sum)
        weighted += tl.sum(e * tl.where(visible, below, 0.0), 1)
        row_sum = rescale * row_sum + tl.sum(e, 1)
        distance = rescale * distance + tl.sum(e * tl.abs(away).to(tl.float32), 1)
        highest = higher

    out = statistics_ptr + (token * heads + head) * COUNT
    tl.store(out, tl.log(row_sum) - weighted / row_sum, mask=mask_m)
    tl.store(out + 1, distance / row_sum, mask=mask_m)
    # The score of a key that the query does not see may not have been computed.
    at_first = tl.where(seen_begin == 0, tl.exp(s_first - highest) / row_sum, 0.0)
    at_last = tl.where(seen_end == length, tl.exp(s_last - highest) / row_sum, 0.0)
    previous = tl.where(seen_begin < offs_m, tl.exp(s_previous - highest) / row_sum, 0.0)
    following = tl.where(seen_end > offs_m + 1, tl.exp(s_next - highest) / row_sum, 0.0)
    sees_target = (target >= seen_begin) & (target < seen_end)
    tl.store(out + 2, at_first, mask=mask_m)
    tl.store(out + 3, at_last, mask=mask_m)
    tl.store(out + 4, tl.exp(s_self - highest) / row_sum, mask=mask_m)
    tl.store(out + 5, previous, mask=mask_m)
    tl.store(out + 6, following, mask=mask_m)
    tl.store(out + 7, tl.where(sees_target, tl.exp(s_target - highest) / row_sum, 0.0), mask=mask_m)
    tl.store(strongest_ptr + token * heads + head, strongest, mask=mask_m)


def config(head_dim: int, itemsize: int, biased: bool) -> dict:
    """Launch parameters; not tuned on a device yet.

    A block of scores fits in the registers of 4 warps. With the limits of a window or the addresses of a bias it needs
    those of 8. float32 products run without matrix instructions and keep their operands in registers too, so their
    blocks are smaller.
    """
    if itemsize == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 16 if head_dim > 64 else 32, "num_warps": 4}
    if biased:
        return {"BLOCK_M": 64, "BLOCK_N": 16, "num_warps": 8}
    return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4}


def head_statistics(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    targets: Tensor | None,
    relative_bias: Tensor | None,
    max_seqlen: int,
    scale: float,
    window_left: int,
    window_right: int,
    skip_ends: bool,
) -> tuple[Tensor, Tensor]:
    """(statistics float32 (tokens, heads, 8), strongest int32 (tokens, heads))."""
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    cu_seqlens = cu_seqlens.contiguous()
    tokens, heads, dim = q.shape
    statistics = q.new_empty((tokens, heads, COUNT.value), dtype=torch.float32)
    strongest = q.new_empty((tokens, heads), dtype=torch.int32)
    if strongest.numel():
        window = max(window_left, window_right) >= 0
        launch = config(dim, q.element_size(), window or relative_bias is not None)
        blocks = triton.cdiv(max_seqlen, launch["BLOCK_M"])
        run(
            _head_statistics_kernel,
            (blocks * (cu_seqlens.shape[0] - 1), heads),
            q,
            k,
            cu_seqlens,
            cu_seqlens if targets is None else targets.contiguous(),
            None if relative_bias is None else relative_bias.contiguous(),
            statistics,
            strongest,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            heads,
            blocks,
            scale,
            0 if relative_bias is None else relative_bias.shape[1] // 2,
            tokens if window_left < 0 else min(window_left, tokens),
            tokens if window_right < 0 else min(window_right, tokens),
            D=dim,
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            TARGETS=targets is not None,
            SKIP_ENDS=skip_ends,
            WINDOW=window,
            **launch,
        )
    return statistics, strongest
