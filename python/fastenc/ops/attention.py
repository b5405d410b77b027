"""Attention over packed sequences: self-attention of one packed qkv, and cross-attention of separate q, k and v."""

from typing import Any

import torch
from torch import Tensor

from fastenc.kernels.attention_call import AttentionCall, self_attention_call
from fastenc.ops import checks
from fastenc.ops._cudnn_attention import cudnn_attention
from fastenc.ops.attention_blocks import AttentionBlocks, check_blocks
from fastenc.ops.attention_kernels import attend_with_kernels, split_qkv
from fastenc.ops.dispatch import choose, declare
from fastenc.ops.rotary import check_table
from fastenc.packing import check_cu_seqlens
from fastenc.reference import attention as reference
from fastenc.reference.rotary import rotary as rotate_reference

WIDEST = 512  # the widest head that the C++ kernels take
WIDEST_TRITON = 256
WIDEST_FLOAT32 = 128  # the widest float32 head that the Triton kernels take

declare("attention", "cpp", "triton", "cudnn")
declare("cross_attention", "cpp", "triton")


def attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    rotary: Tensor | None = None,
    bounds: Tensor | None = None,
    blocks: AttentionBlocks | None = None,
    rng_state: Tensor | None = None,
    num_key_heads: int | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> Any:
    """Non-causal attention inside each sequence of a packed batch.

        s[i, j] = softmax_scale * q[i] . k[j] + bias[i, j],  j over i's sequence and window
        out[i] = sum_j dropout(softmax_j(s[i, j])) v[j]
        bias[i, j] = relative_bias[j - i] - alibi_slope * |j - i| + key_bias[j]

    A token that sees no key (all keys are outside its window or have a bias of -inf) gets 0, and a gradient of 0.

    Args:
        qkv: (total_tokens, 3, num_heads, head_dim), floating point. It is read in place if its last stride is 1. With
            num_key_heads it is (total_tokens, num_heads + 2 * num_key_heads, head_dim): queries, keys, values.
        cu_seqlens: int32 (batch+1,), offsets of the sequences from 0 to total_tokens.
        max_seqlen: host int, at least the longest sequence. On a GPU neither max_seqlen nor the offsets are checked,
            because that would wait for the device. If max_seqlen is too small, or the offsets end before the last
            token, the remaining rows are undefined. FASTENC_DEBUG=1 checks both.
        dropout_p: probability of dropping a softmax weight, rounded to a multiple of 2^-16. Applied whenever
            positive: pass 0 in evaluation.
        softmax_scale: head_dim ** -0.5 if None.
        window_size: (left, right): the number of tokens that a token sees on each side; -1 is no limit.
        alibi_slopes: floating point (num_heads,).
        relative_bias: floating point (num_heads, 2 * R + 1), column R + d for distance d = j - i, clamped to
            [-R, R]. T5's table is one of buckets: with R its max_distance,
            ``weight[bucket(torch.arange(-R, R + 1))].T`` for ``weight`` (num_buckets, num_heads).
        key_bias: floating point (total_tokens,), added to every score of a key; -inf hides it.
        rotary: float32 (positions, rotary_dim), the table of angles that :func:`rotary` takes. Queries and keys are
            rotated by it.
        bounds: int32 (2, total_tokens), the result of :func:`sequence_bounds`, which several calls over the same
            sequences can share. None: computed in the call if a kernel needs it.
        blocks: the result of :func:`fastenc.ops.attention_blocks.attention_blocks`, which several calls over the same
            sequences can share. With it, a GPU starts programs only for blocks that exist, and runs short sequences
            in the kernel for short sequences even if the batch has a long one. None: the grid is sized for the longest
            sequence.
        rng_state: int64 (2,), seed and offset of dropout's mask, on qkv's device. None: random, from the device's
            default generator.
        num_key_heads: for grouped queries, the number of heads of keys and values, which divides num_heads. Head h of
            the queries reads head h // (num_heads / num_key_heads). Nothing is copied, except by cuDNN.
        return_lse: also return softmax_lse, the natural logarithm of sum_j exp(s[i, j]); -inf without a key.
        impl: "auto", "cpp" (head_dim a multiple of 16 up to 512), "triton" (head_dim up to 256, in float32 up to 128),
            "reference" or "cudnn". "auto" never takes "cudnn", cuDNN's kernels through PyTorch: float16 or bfloat16, no
            empty sequences, no window, biases, rotary, rng_state or return_lse; it copies q, k and v, and its dropout
            mask is not the library's. Up to PyTorch 2.13 its gradient takes sequences of at most head_dim tokens.
    Returns: (total_tokens, num_heads, head_dim), dtype of qkv; with return_lse also softmax_lse
        (num_heads, total_tokens), float32.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: fp32 arithmetic. On a GPU, products of float32 are in TF32 if torch.backends.cuda.matmul allows it. A NaN
        or infinity affects its own sequence only, with one exception: on a GPU, one in the values of a short
        half-precision sequence also reaches the sequences in the same tile.
    Memory: C++ and Triton keep nothing of size length x length.
    Deterministic: yes, except Triton's backward. That is deterministic under torch.use_deterministic_algorithms, which
        makes it slower, and for half-precision sequences of at most 128 tokens with head_dim up to 64, without window,
        bias and gradient through softmax_lse.
    Differentiable: qkv, relative_bias.
    Source: Vaswani et al. 2017, arXiv:1706.03762; Press et al. 2021, arXiv:2108.12409 (ALiBi); Raffel et al.
    2020, arXiv:1910.10683 (T5); Ainslie et al. 2023, arXiv:2305.13245 (grouped queries).
    """
    _check_qkv(qkv, num_key_heads)
    checks.check_device("attention", "cu_seqlens", cu_seqlens, qkv)
    check_cu_seqlens(cu_seqlens, qkv.shape[0], max_seqlen)
    checks.check_window("attention", window_size)
    attention_call = self_attention_call(
        cu_seqlens,
        max_seqlen,
        scale=qkv.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        dropout_p=dropout_p,
        rng_state=rng_state,
        alibi_slopes=alibi_slopes,
        relative_bias=relative_bias,
        key_bias=key_bias,
        rotary=rotary,
        bounds=bounds,
        window_left=window_size[0],
        window_right=window_size[1],
    )
    if blocks is not None:
        check_blocks("attention", blocks, qkv)
        attention_call = attention_call._replace(
            all_blocks=blocks.all_blocks, long_blocks=blocks.long_blocks
        )
    return _attend("attention", (qkv,), attention_call, return_lse, impl, num_key_heads)


def _check_qkv(qkv: Tensor, num_key_heads: int | None) -> None:
    if num_key_heads is None:
        fits = qkv.dim() == 4 and qkv.shape[1] == 3
    else:
        num_heads = qkv.shape[1] - 2 * num_key_heads if qkv.dim() == 3 else 0
        fits = num_key_heads > 0 and num_heads > 0 and num_heads % num_key_heads == 0
    if not fits or not qkv.is_floating_point():
        # Here, because torch.compile does not trace a text of a number that it knows as a symbol.
        shape = "(total_tokens, 3, num_heads, head_dim)"
        if num_key_heads is not None:
            shape = f"(total_tokens, num_heads + 2 * {num_key_heads}, head_dim)"
            shape += f" with num_heads a multiple of {num_key_heads}" if qkv.dim() == 3 else ""
        raise ValueError(
            f"attention: qkv must be floating point of shape {shape}, "
            f"got {qkv.dtype} of shape {tuple(qkv.shape)}: view the fused projection's output that way"
        )


def cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    rng_state: Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> Any:
    """:func:`attention` with separate queries, keys and values.

    Sequence b of the queries sees sequence b of the keys, whose length may differ: encoder states, or a learned prefix
    followed by the sequence's keys. For distances (window, ALiBi, relative bias) the ends of both are aligned: query i
    has the position of key i + length_k - length_q. So a prefix changes no distance. There is no argument for rotary
    angles, because only the caller knows the positions of such keys: rotate them before with :func:`rotary`.

    Args:
        q: (total_q, num_heads, head_dim), floating point; read in place if its last stride is 1, as k and v are.
        k, v: (total_k, num_key_heads, head_dim), dtype of q. num_key_heads divides num_heads: with fewer heads than q,
            head h of the queries reads head h // (num_heads / num_key_heads).
        cu_seqlens_q, cu_seqlens_k: int32 (batch+1,), offsets from 0 to total_q and total_k.
        max_seqlen_q, max_seqlen_k: host ints, at least the longest sequence of each.
        key_bias: floating point (total_k,).
        The others: as for :func:`attention`.
    Returns: (total_q, num_heads, head_dim), dtype of q; with return_lse also softmax_lse (num_heads, total_q),
        float32. A query without keys gets 0 and -inf.
    Raises, numerics, memory, source: as for :func:`attention`. Differentiable: q, k, v, relative_bias.
    """
    _check_q_k_v(q, k, v)
    checks.check_device("cross_attention", "cu_seqlens_q", cu_seqlens_q, q)
    checks.check_device("cross_attention", "cu_seqlens_k", cu_seqlens_k, q)
    check_cu_seqlens(cu_seqlens_q, q.shape[0], max_seqlen_q, "_q")
    check_cu_seqlens(cu_seqlens_k, k.shape[0], max_seqlen_k, "_k")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cross_attention: cu_seqlens_q and cu_seqlens_k must have one entry for each sequence, got "
            f"{cu_seqlens_q.shape[0]} and {cu_seqlens_k.shape[0]}: give a sequence without keys length 0"
        )
    checks.check_window("cross_attention", window_size)
    attention_call = self_attention_call(
        cu_seqlens_q,
        max_seqlen_q,
        scale=q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
        dropout_p=dropout_p,
        rng_state=rng_state,
        cu_seqlens_k=None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k,
        max_seqlen_k=max_seqlen_k,
        alibi_slopes=alibi_slopes,
        relative_bias=relative_bias,
        key_bias=key_bias,
        window_left=window_size[0],
        window_right=window_size[1],
    )
    return _attend("cross_attention", (q, k, v), attention_call, return_lse, impl)


def _check_q_k_v(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 3 or not q.is_floating_point():
        raise ValueError(
            "cross_attention: q must be floating point of shape (total_q, num_heads, head_dim), "
            f"got {q.dtype} of shape {tuple(q.shape)}: view the projection's output that way"
        )
    heads, head_dim = q.shape[1:]
    for name, value in (("k", k), ("v", v)):
        divides = value.dim() == 3 and value.shape[1] and heads % value.shape[1] == 0
        if (
            not (divides or heads == 0)
            or value.shape != (*k.shape[:2], head_dim)
            or value.dtype != q.dtype
        ):
            raise ValueError(
                f"cross_attention: {name} must have shape (total_k, {heads} or a divisor of it, {head_dim}) and dtype "
                f"{q.dtype}, as q and the other of k and v, got {value.dtype} of shape {tuple(value.shape)}"
            )
        checks.check_device("cross_attention", name, value, q)


def _attend(
    op: str,
    qkv: tuple[Tensor, ...],
    attention_call: AttentionCall,
    return_lse: bool,
    impl: str,
    num_key_heads: int | None = None,
) -> Any:
    """Check the call, and run it in the implementation that is chosen.

    Args: qkv, num_key_heads: as :func:`split_qkv` takes them.
    """
    q, k, v = split_qkv(qkv, num_key_heads)
    head_dim = q.shape[2]
    _check_call(op, attention_call, q, k)
    cpp_limit = None
    if head_dim % 16 or not 0 < head_dim <= WIDEST:
        cpp_limit = f"head_dim must be a multiple of 16 up to {WIDEST}, got {head_dim}"
    chosen = choose(
        op,
        impl,
        q,
        cpp_limit=cpp_limit,
        triton_limit=triton_limit(head_dim, q.dtype),
        reference_cost="whose time and memory grow with the square of the longest sequence",
    )
    if chosen == "cudnn":
        return cudnn_attention(q, *_repeated(q, k, v), attention_call, return_lse)
    attention_call = attention_call._replace(
        rng_state=checks.mask_rng_state(op, attention_call.rng_state, attention_call.dropout_p, q)
    )
    if chosen == "reference":
        out, lse = _reference(q, k, v, attention_call)
    else:
        out, lse = attend_with_kernels(qkv, attention_call, num_key_heads)
    return (out, lse) if return_lse else out


def _check_call(op: str, attention_call: AttentionCall, q: Tensor, k: Tensor) -> None:
    """Check the arguments that both functions have."""
    c = attention_call
    checks.check_dropout(op, c.dropout_p)
    checks.check_relative_bias(op, c.relative_bias, q)
    heads, keys = q.shape[1], k.shape[0]
    _check_constant_bias(op, "alibi_slopes", c.alibi_slopes, heads, "head", k)
    _check_constant_bias(op, "key_bias", c.key_bias, keys, "key", k)
    if c.rotary is not None:
        check_table(op, "rotary", c.rotary, q, c.max_seqlen_q)
    if c.bounds is not None:
        _check_bounds(op, c.bounds, q)


def _check_constant_bias(
    op: str, name: str, value: Tensor | None, size: int, of_each: str, k: Tensor
) -> None:
    """Check a vector of ``size`` numbers, one for each head or key, that gets no gradient."""
    if value is None:
        return
    if value.shape != (size,) or not value.is_floating_point():
        raise ValueError(
            f"{op}: {name} must be floating point of shape ({size},), one for each {of_each}, got {value.dtype} of "
            f"shape {tuple(value.shape)}"
        )
    checks.check_device(op, name, value, k)
    if value.requires_grad:
        raise ValueError(
            f"{op}: {name} is not differentiable, got a tensor that requires a gradient: detach it"
        )


def _check_bounds(op: str, bounds: Tensor, q: Tensor) -> None:
    if bounds.dtype != torch.int32 or bounds.shape != (2, q.shape[0]):
        raise ValueError(
            f"{op}: bounds must be int32 of shape (2, {q.shape[0]}), got {bounds.dtype} of shape "
            f"{tuple(bounds.shape)}: make them with sequence_bounds"
        )
    checks.check_device(op, "bounds", bounds, q)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as the queries."""
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    if group == 1:
        return k, v
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, attention_call: AttentionCall
) -> tuple[Tensor, Tensor]:
    c = attention_call
    if c.rotary is not None:
        q, k = (rotate_reference(x, c.rotary, c.cu_seqlens_q) for x in (q, k))
    return reference.attention(
        q,
        *_repeated(q, k, v),
        c.cu_seqlens_q,
        c.cu_seqlens_q if c.cu_seqlens_k is None else c.cu_seqlens_k,
        c.max_seqlen_q,
        c.max_seqlen_k,
        dropout_p=c.dropout_p,
        rng_state=c.rng_state,
        softmax_scale=c.scale,
        window_size=(c.window_left, c.window_right),
        alibi_slopes=c.alibi_slopes,
        relative_bias=c.relative_bias,
        key_bias=c.key_bias,
    )


def triton_limit(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels do not take heads of this size and dtype, or None."""
    if not 0 < head_dim <= WIDEST_TRITON:
        return f"head_dim must be at most {WIDEST_TRITON}, got {head_dim}"
    if head_dim > WIDEST_FLOAT32 and dtype.itemsize > 2:
        return (
            f"head_dim must be at most {WIDEST_FLOAT32} in {dtype}, got {head_dim}: wider heads spill registers, use "
            "bfloat16 or float16"
        )
    return None


def sequence_bounds(x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor | None:
    """The begin and the end of each token's sequence, for all calls of :func:`attention` over one batch.

    Args: x: (total_tokens, ...), whose device and dtype say which kernel takes the calls.
    Returns: int32 (2, total_tokens), or None if that kernel does not need it.
    """
    if choose("attention", "auto", x) != "triton":
        return None
    return torch.ops.fastenc.sequence_bounds(cu_seqlens, x.shape[0], max_seqlen)
