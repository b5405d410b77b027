"""Non-causal attention over packed sequences, forward and backward, by online softmax.

    out = dropout(softmax(scale * q k^T)) v inside each sequence;  lse = log2 sum_j exp2(scale * log2(e) * q k_j)

Tiling: one program is (block of BLOCK_M queries, sequence, head); it walks the keys in blocks of BLOCK_N with running
maximum and sum. Blocks past a sequence's end exit at once: the grid depends on max_seqlen only, so nothing is read
back from the device. The backward has one program for each block of keys, which forms the probabilities again from lse
and keeps dk and dv in registers; dq is added atomically in float32, or, deterministically, by a second kernel with one
program for each block of queries.

Bytes: forward reads qkv and writes out, 4 T H D elements. FLOPs: 4 H D sum(length^2) forward, 10 backward.
Source: Dao 2023, arXiv:2307.08691.
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.dropout import dropout_scale
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_rows(base, rows, stride, valid, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(len(rows), BLOCK_D), zero where not valid or past head_dim."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (offs_d < D)[None, :]
    return tl.load(
        base + rows.to(tl.int64)[:, None] * stride + offs_d[None, :], mask=mask, other=0.0
    )


@triton.jit
def _store_rows(base, rows, stride, valid, values, D: tl.constexpr, BLOCK_D: tl.constexpr):
    offs_d = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (offs_d < D)[None, :]
    pointers = base + rows.to(tl.int64)[:, None] * stride + offs_d[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _attention_fwd_kernel(
    qkv_ptr,  # (total_tokens, 3, H, D)
    out_ptr,  # (total_tokens, H, D)
    lse_ptr,  # (H, total_tokens), float32
    cu_seqlens_ptr,  # (batch+1,), int32
    seed_ptr,  # (1,), int64
    stride_token,
    stride_part,
    stride_head,
    total_tokens,
    scale,
    threshold,
    drop_scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head = tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_seqlens_ptr + sequence)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - first
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(0) * BLOCK_M >= length:
        return
    mask_m = offs_m < length
    base = qkv_ptr + first.to(tl.int64) * stride_token + head * stride_head
    q = _load_rows(base, offs_m, stride_token, mask_m, D, BLOCK_D)
    qk_scale = scale * LOG2_E
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(0, length, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < length
        k = _load_rows(base + stride_part, offs_n, stride_token, mask_n, D, BLOCK_D)
        v = _load_rows(base + 2 * stride_part, offs_n, stride_token, mask_n, D, BLOCK_D)
        s = tl.dot(q, k.T, input_precision=PRECISION) * qk_scale
        s = tl.where(mask_n[None, :], s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, 1))
        p = tl.math.exp2(s - new_peak[:, None])
        rescale = tl.math.exp2(peak - new_peak)
        total = total * rescale + tl.sum(p, 1)
        if HAS_DROPOUT:
            rows = (first + offs_m)[:, None]
            p *= dropout_scale(
                tl.load(seed_ptr), head, rows, offs_n[None, :], threshold, drop_scale
            )
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        peak = new_peak
    out = acc / total[:, None]
    out_base = out_ptr + first.to(tl.int64) * (H * D) + head * D
    _store_rows(out_base, offs_m, H * D, mask_m, out, D, BLOCK_D)
    lse_row = lse_ptr + head.to(tl.int64) * total_tokens + first
    tl.store(lse_row + offs_m, peak + tl.math.log2(total), mask=mask_m)


@triton.jit
def _attention_delta_kernel(
    out_ptr,
    dout_ptr,
    delta_ptr,
    total_tokens,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta[h, i] = sum_d out[i, h, d] * dout[i, h, d], which equals sum_j p_ij dp_ij, dropout included."""
    head = tl.program_id(1)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < total_tokens
    out = _load_rows(out_ptr + head * D, offs_m, H * D, mask_m, D, BLOCK_D).to(tl.float32)
    dout = _load_rows(dout_ptr + head * D, offs_m, H * D, mask_m, D, BLOCK_D).to(tl.float32)
    tl.store(
        delta_ptr + head.to(tl.int64) * total_tokens + offs_m, tl.sum(out * dout, 1), mask=mask_m
    )


@triton.jit
def _probabilities(q, k, lse, qk_scale, valid, PRECISION: tl.constexpr):
    s = tl.dot(q, k.T, input_precision=PRECISION) * qk_scale
    return tl.where(valid, tl.math.exp2(s - lse[:, None]), 0.0)


@triton.jit
def _attention_bwd_kv_kernel(
    qkv_ptr,
    dout_ptr,
    dqkv_ptr,  # (total_tokens, 3, H, D), contiguous
    dq_ptr,  # (total_tokens, H, D), float32, zeroed; only if ATOMIC_DQ
    lse_ptr,
    delta_ptr,
    cu_seqlens_ptr,
    seed_ptr,
    stride_token,
    stride_part,
    stride_head,
    total_tokens,
    scale,
    threshold,
    drop_scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    ATOMIC_DQ: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head = tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_seqlens_ptr + sequence)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - first
    if tl.program_id(0) * BLOCK_N >= length:
        return
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < length
    base = qkv_ptr + first.to(tl.int64) * stride_token + head * stride_head
    dout_base = dout_ptr + first.to(tl.int64) * (H * D) + head * D
    rows_base = head.to(tl.int64) * total_tokens + first
    k = _load_rows(base + stride_part, offs_n, stride_token, mask_n, D, BLOCK_D)
    v = _load_rows(base + 2 * stride_part, offs_n, stride_token, mask_n, D, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in tl.range(0, length, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        mask_m = offs_m < length
        q = _load_rows(base, offs_m, stride_token, mask_m, D, BLOCK_D)
        dout = _load_rows(dout_base, offs_m, H * D, mask_m, D, BLOCK_D)
        lse = tl.load(lse_ptr + rows_base + offs_m, mask=mask_m, other=0.0)
        delta = tl.load(delta_ptr + rows_base + offs_m, mask=mask_m, other=0.0)
        valid = mask_m[:, None] & mask_n[None, :]
        p = _probabilities(q, k, lse, scale * LOG2_E, valid, PRECISION)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        kept = p
        if HAS_DROPOUT:
            rows = (first + offs_m)[:, None]
            keep = dropout_scale(
                tl.load(seed_ptr), head, rows, offs_n[None, :], threshold, drop_scale
            )
            kept = p * keep
            dp *= keep
        dv = tl.dot(kept.to(dout.dtype).T, dout, dv, input_precision=PRECISION)
        ds = (p * (dp - delta[:, None])).to(q.dtype)
        dk = tl.dot(ds.T, q, dk, input_precision=PRECISION)
        if ATOMIC_DQ:
            dq = tl.dot(ds, k, input_precision=PRECISION) * scale
            offs_d = tl.arange(0, BLOCK_D)
            pointers = (
                dq_ptr
                + (first + offs_m).to(tl.int64)[:, None] * (H * D)
                + head * D
                + offs_d[None, :]
            )
            tl.atomic_add(pointers, dq, mask=mask_m[:, None] & (offs_d < D)[None, :], sem="relaxed")
    grad_base = dqkv_ptr + first.to(tl.int64) * (3 * H * D) + head * D
    _store_rows(grad_base + H * D, offs_n, 3 * H * D, mask_n, dk * scale, D, BLOCK_D)
    _store_rows(grad_base + 2 * H * D, offs_n, 3 * H * D, mask_n, dv, D, BLOCK_D)


@triton.jit
def _attention_bwd_q_kernel(
    qkv_ptr,
    dout_ptr,
    dqkv_ptr,
    lse_ptr,
    delta_ptr,
    cu_seqlens_ptr,
    seed_ptr,
    stride_token,
    stride_part,
    stride_head,
    total_tokens,
    scale,
    threshold,
    drop_scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head = tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_seqlens_ptr + sequence)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - first
    if tl.program_id(0) * BLOCK_M >= length:
        return
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < length
    base = qkv_ptr + first.to(tl.int64) * stride_token + head * stride_head
    rows_base = head.to(tl.int64) * total_tokens + first
    q = _load_rows(base, offs_m, stride_token, mask_m, D, BLOCK_D)
    dout = _load_rows(
        dout_ptr + first.to(tl.int64) * (H * D) + head * D, offs_m, H * D, mask_m, D, BLOCK_D
    )
    lse = tl.load(lse_ptr + rows_base + offs_m, mask=mask_m, other=0.0)
    delta = tl.load(delta_ptr + rows_base + offs_m, mask=mask_m, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(0, length, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < length
        k = _load_rows(base + stride_part, offs_n, stride_token, mask_n, D, BLOCK_D)
        v = _load_rows(base + 2 * stride_part, offs_n, stride_token, mask_n, D, BLOCK_D)
        valid = mask_m[:, None] & mask_n[None, :]
        p = _probabilities(q, k, lse, scale * LOG2_E, valid, PRECISION)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        if HAS_DROPOUT:
            rows = (first + offs_m)[:, None]
            dp *= dropout_scale(
                tl.load(seed_ptr), head, rows, offs_n[None, :], threshold, drop_scale
            )
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    grad_base = dqkv_ptr + first.to(tl.int64) * (3 * H * D) + head * D
    _store_rows(grad_base, offs_m, 3 * H * D, mask_m, dq * scale, D, BLOCK_D)


def config(kernel: str, head_dim: int, max_seqlen: int) -> dict:
    """Launch parameters of "forward", "backward_kv" or "backward_q": chosen by registers, not tuned on a device yet.

    64 query rows take 4 warps: 8 would form each softmax twice. The kv kernel keeps two accumulators and five operands,
    so it takes 32 rows at a time, and 8 warps for wide heads; 64 rows spilled up to 800 bytes a thread.
    """
    if kernel == "backward_kv":
        return _launch(32, 64, 4 if head_dim <= 64 else 8)
    if kernel == "forward" and head_dim <= 32 and max_seqlen > 64:
        return _launch(64, 128, 4)
    return _launch(64, 64, 4)


def _launch(block_m: int, block_n: int, num_warps: int) -> dict:
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": 2}


def _common(
    qkv: Tensor, cu_seqlens: Tensor, seed: Tensor | None, dropout_p: float
) -> tuple[tuple, dict]:
    """Dropout arguments and compile-time constants that the kernels share."""
    threshold = int(dropout_p * 65536 + 0.5) if seed is not None else 0
    heads, head_dim = qkv.shape[2:]
    tf32 = torch.backends.cuda.matmul.allow_tf32
    constants = {
        "H": heads,
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "HAS_DROPOUT": threshold > 0,
        "PRECISION": "tf32" if tf32 and qkv.dtype == torch.float32 else "ieee",
    }
    return (threshold, 65536 / (65536 - threshold)), constants


def attention_forward(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out (total_tokens, H, D), lse (H, total_tokens) float32 in units of log2)."""
    if qkv.stride(3) != 1:
        qkv = qkv.contiguous()
    total_tokens, _, heads, head_dim = qkv.shape
    out = qkv.new_empty((total_tokens, heads, head_dim))
    lse = qkv.new_empty((heads, total_tokens), dtype=torch.float32)
    dropout, constants = _common(qkv, cu_seqlens, seed, dropout_p)
    launch = config("forward", head_dim, max_seqlen)
    grid = (triton.cdiv(max_seqlen, launch["BLOCK_M"]), cu_seqlens.shape[0] - 1, heads)
    if 0 in grid:
        return out, lse
    _attention_fwd_kernel[grid](
        qkv,
        out,
        lse,
        cu_seqlens,
        cu_seqlens if seed is None else seed,
        *qkv.stride()[:3],
        total_tokens,
        scale,
        *dropout,
        **constants,
        **launch,
    )
    return out, lse


def attention_backward(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """dqkv, contiguous; dq by atomic addition, or by its own kernel under torch.use_deterministic_algorithms."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    if qkv.stride(3) != 1:
        qkv = qkv.contiguous()
    total_tokens, _, heads, head_dim = qkv.shape
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    dropout, constants = _common(qkv, cu_seqlens, seed, dropout_p)
    launch = config("backward_kv", head_dim, max_seqlen)
    grid = (triton.cdiv(max_seqlen, launch["BLOCK_N"]), cu_seqlens.shape[0] - 1, heads)
    if 0 in grid:
        return dqkv
    dout = dout.contiguous()
    delta = torch.empty_like(lse)
    sizes = {name: constants[name] for name in ("H", "D", "BLOCK_D")}
    _attention_delta_kernel[(triton.cdiv(total_tokens, 64), heads)](
        out, dout, delta, total_tokens, **sizes, BLOCK_M=64, num_warps=4
    )
    dq = None if deterministic else torch.zeros(out.shape, dtype=torch.float32, device=qkv.device)
    shared = (
        lse,
        delta,
        cu_seqlens,
        cu_seqlens if seed is None else seed,
        *qkv.stride()[:3],
        total_tokens,
        scale,
    )
    _attention_bwd_kv_kernel[grid](
        qkv,
        dout,
        dqkv,
        delta if dq is None else dq,
        *shared,
        *dropout,
        **constants,
        **launch,
        ATOMIC_DQ=dq is not None,
    )
    if dq is None:
        launch = config("backward_q", head_dim, max_seqlen)
        grid = (triton.cdiv(max_seqlen, launch["BLOCK_M"]), *grid[1:])
        _attention_bwd_q_kernel[grid](qkv, dout, dqkv, *shared, *dropout, **constants, **launch)
    else:
        dqkv[:, 0] = dq
    return dqkv
