"""Attention over packed sequences: self-attention of one packed qkv, and cross-attention of separate q, k and v."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.kernels.attention_call import TENSORS, AttentionCall, self_attention_call
from fastenc.ops import checks
from fastenc.ops._cudnn_attention import cudnn_attention
from fastenc.ops.attention_blocks import AttentionBlocks, check_blocks
from fastenc.ops.cases import (
    Draw,
    Size,
    declare_case,
    masked_scores,
    rotary_table,
    rotated,
    sequences,
)
from fastenc.ops.dispatch import choose, declare
from fastenc.ops.library import define
from fastenc.ops.rotary import check_table
from fastenc.packing import check_cu_seqlens
from fastenc.reference import attention as reference
from fastenc.reference.rotary import rotary as rotate_reference

FIELDS, RELATIVE_BIAS = len(AttentionCall._fields), AttentionCall._fields.index("relative_bias")

WIDEST = 256  # the widest head that the kernels take
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
        impl: "auto", "cpp" (head_dim a multiple of 16 up to 256), "triton" (head_dim up to 256, in float32 up to 128),
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


def triton_limit(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels do not take heads of this size and dtype, or None."""
    if not 0 < head_dim <= WIDEST:
        return f"head_dim must be at most {WIDEST}, got {head_dim}"
    if head_dim > WIDEST_FLOAT32 and dtype.itemsize > 2:
        return (
            f"head_dim must be at most {WIDEST_FLOAT32} in {dtype}, got {head_dim}: wider heads spill registers, use "
            "bfloat16 or float16"
        )
    return None


def _attend(
    op: str,
    qkv: tuple[Tensor, ...],  # one tensor that holds all three, or three
    attention_call: AttentionCall,
    return_lse: bool,
    impl: str,
    num_key_heads: int | None = None,
) -> Any:
    q, k, v = _split(qkv, num_key_heads)
    heads, head_dim = q.shape[1:]
    checks.check_dropout(op, attention_call.dropout_p)
    checks.check_relative_bias(op, attention_call.relative_bias, q)
    _check_biases(op, attention_call.alibi_slopes, attention_call.key_bias, heads, k)
    if attention_call.rotary is not None:
        check_table(op, "rotary", attention_call.rotary, q, attention_call.max_seqlen_q)
    if attention_call.bounds is not None:
        _check_bounds(op, attention_call.bounds, q)
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
        group = heads // k.shape[1]
        k, v = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
        return cudnn_attention(q, k, v, attention_call, return_lse)
    attention_call = attention_call._replace(
        rng_state=checks.mask_rng_state(op, attention_call.rng_state, attention_call.dropout_p, q)
    )
    if chosen == "reference":
        out, lse = _reference(q, k, v, attention_call)
        return (out, lse) if return_lse else out
    alibi_slopes, relative_bias, key_bias = (
        x if x is None else x.float()
        for x in (
            attention_call.alibi_slopes,
            attention_call.relative_bias,
            attention_call.key_bias,
        )
    )
    attention_call = attention_call._replace(
        alibi_slopes=alibi_slopes, relative_bias=relative_bias, key_bias=key_bias
    )
    wants_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*qkv, relative_bias)
    )
    if wants_grad:
        out, lse = _Attention.apply(*attention_call, num_key_heads, *qkv)
    else:
        out, lse = torch.ops.fastenc.attention_fwd(q, k, v, *attention_call)
    return (out, lse) if return_lse else out


def _reference(
    q: Tensor, k: Tensor, v: Tensor, attention_call: AttentionCall
) -> tuple[Tensor, Tensor]:
    if attention_call.rotary is not None:
        q, k = (
            rotate_reference(x, attention_call.rotary, attention_call.cu_seqlens_q) for x in (q, k)
        )
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
    return reference.attention(
        q,
        k,
        v,
        attention_call.cu_seqlens_q,
        attention_call.cu_seqlens_q
        if attention_call.cu_seqlens_k is None
        else attention_call.cu_seqlens_k,
        attention_call.max_seqlen_q,
        attention_call.max_seqlen_k,
        dropout_p=attention_call.dropout_p,
        rng_state=attention_call.rng_state,
        softmax_scale=attention_call.scale,
        window_size=(attention_call.window_left, attention_call.window_right),
        alibi_slopes=attention_call.alibi_slopes,
        relative_bias=attention_call.relative_bias,
        key_bias=attention_call.key_bias,
    )


def sequence_bounds(x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor | None:
    """The begin and the end of each token's sequence, for all calls of :func:`attention` over one batch.

    Args: x: (total_tokens, ...), whose device and dtype say which kernel takes the calls.
    Returns: int32 (2, total_tokens), or None if that kernel does not need it.
    """
    if choose("attention", "auto", x) != "triton":
        return None
    return torch.ops.fastenc.sequence_bounds(cu_seqlens, x.shape[0], max_seqlen)


def _check_bounds(op: str, bounds: Tensor, q: Tensor) -> None:
    if bounds.dtype != torch.int32 or bounds.shape != (2, q.shape[0]):
        raise ValueError(
            f"{op}: bounds must be int32 of shape (2, {q.shape[0]}), got {bounds.dtype} of shape "
            f"{tuple(bounds.shape)}: make them with sequence_bounds"
        )
    checks.check_device(op, "bounds", bounds, q)


def _check_biases(
    op: str,
    alibi_slopes: Tensor | None,
    key_bias: Tensor | None,
    heads: int,
    k: Tensor,
) -> None:
    def check(name: str, value: Tensor | None, fits: bool, shape: str) -> None:
        if value is None:
            return
        if not fits or not value.is_floating_point():
            raise ValueError(
                f"{op}: {name} must be floating point of shape {shape}, got {value.dtype} of shape "
                f"{tuple(value.shape)}"
            )
        checks.check_device(op, name, value, k)
        if value.requires_grad:
            raise ValueError(
                f"{op}: {name} is not differentiable, got a tensor that requires a gradient: detach it"
            )

    check(
        "alibi_slopes",
        alibi_slopes,
        alibi_slopes is not None and alibi_slopes.shape == (heads,),
        f"({heads},), one for each head",
    )
    check(
        "key_bias",
        key_bias,
        key_bias is not None and key_bias.shape == (k.shape[0],),
        f"({k.shape[0]},), one for each key",
    )


def _split(qkv: tuple[Tensor, ...], num_key_heads: int | None) -> tuple[Tensor, ...]:
    if len(qkv) > 1:
        return qkv
    if num_key_heads is None:
        return qkv[0].unbind(1)
    return qkv[0].split((qkv[0].shape[1] - 2 * num_key_heads, num_key_heads, num_key_heads), 1)


class _Attention(torch.autograd.Function):
    """Arguments: the fields of an AttentionCall, num_key_heads, then one qkv or q, k and v."""

    @staticmethod
    def forward(ctx, *arguments):
        attention_call, qkv = AttentionCall(*arguments[:FIELDS]), arguments[FIELDS + 1 :]
        ctx.num_key_heads = arguments[FIELDS]
        q, k, v = _split(qkv, ctx.num_key_heads)
        out, lse = torch.ops.fastenc.attention_fwd(q, k, v, *attention_call)
        # The backward computes the probabilities again.
        ctx.save_for_backward(out, lse, *attention_call.tensors(), *qkv)
        ctx.attention_call = attention_call.without_tensors()
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        out, lse, *rest = ctx.saved_tensors
        attention_call, qkv = ctx.attention_call.with_tensors(rest[:TENSORS]), rest[TENSORS:]
        wants_relative_bias = ctx.needs_input_grad[RELATIVE_BIAS]
        *grads, drelative_bias, _ = torch.ops.fastenc.attention_bwd(
            torch.zeros_like(out) if dout is None else dout,
            dlse,
            out,
            lse,
            *_split(qkv, ctx.num_key_heads),
            *attention_call,
            len(qkv) == 1,
            wants_relative_bias,
            False,
        )
        if len(qkv) == 1:
            grads = [grads[0].view(qkv[0].shape)]
        of_call = [None] * (FIELDS + 1)
        if wants_relative_bias:
            of_call[RELATIVE_BIAS] = drelative_bias
        return (*of_call, *grads[: len(qkv)])


define(
    "sequence_bounds(Tensor cu_seqlens, SymInt total_tokens, SymInt max_seqlen) -> Tensor",
    lambda cu_seqlens, total_tokens, max_seqlen: cu_seqlens.new_empty((2, total_tokens)),
    triton="attention_short.sequence_bounds",
)
_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rng_state, Tensor? alibi_slopes, "
    "Tensor? relative_bias, Tensor? key_bias, Tensor? rotary, Tensor? bounds, Tensor? all_blocks, "
    "Tensor? long_blocks, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float scale, "
    "SymInt window_left, SymInt window_right"
)


def _fake_forward(q, *attention_call):
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _fake_backward(dout, dlse, out, lse, q, k, v, *rest):
    relative_bias = AttentionCall(*rest[:FIELDS]).relative_bias
    packed, wants_relative_bias, wants_bias = rest[FIELDS:]
    packed_heads = q.shape[1] + 2 * k.shape[1]
    if packed:
        packed_shape = (q.shape[0], packed_heads, q.shape[2])
        grads = (q.new_empty(packed_shape), q.new_empty(0), q.new_empty(0))
    else:
        grads = tuple(x.new_empty(x.shape) for x in (q, k, v))
    return (
        *grads,
        torch.empty_like(relative_bias) if wants_relative_bias else q.new_empty(0),
        q.new_empty(packed_heads * q.shape[2], dtype=torch.float32)
        if wants_bias
        else q.new_empty(0),
    )


define(
    f"attention_fwd({_CALL}) -> (Tensor out, Tensor lse)",
    _fake_forward,
    triton="attention.attention_forward",
)
# k and v may have fewer heads than q, which divide its number.
# packed: q, k and v are views of one qkv. Then the first result is the gradient of qkv, (total_tokens, heads of all
# three, head_dim), and the next two are empty.
# wants_bias, only with packed: return the gradient of the projection's bias too, the sum of dqkv over the tokens,
# float32.
define(
    f"attention_bwd(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_CALL}, bool packed, "
    "bool wants_relative_bias, bool wants_bias) -> (Tensor dq, Tensor dk, Tensor dv, Tensor drelative_bias, "
    "Tensor dbias)",
    _fake_backward,
    triton="attention.attention_backward",
)


def _biases(size: Size, keys: int, draw: Draw) -> dict[str, Any]:
    if not draw.choice(False, True):
        return {}
    table = draw.parameter(size.heads, 2 * draw.choice(32, 0, 1, 9) + 1)
    return {
        "window_size": draw.choice((-1, -1), (2, 3), (0, 0), (-1, 4)),
        "alibi_slopes": draw.choice(None, draw.float32(size.heads).abs()),
        "relative_bias": draw.choice(None, table),
        "key_bias": draw.choice(None, draw.float32(keys)),
    }


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    return {
        "qkv": draw.normal(size.tokens, 3, size.heads, size.head_dim),
        "cu_seqlens": draw.offsets(size.lengths),
        "max_seqlen": size.longest,
        "dropout_p": draw.choice(0.0, 0.0, 0.2),
        "softmax_scale": draw.choice(None, 0.3),
        **_biases(size, size.tokens, draw),
    }


def _cross_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    """Every sequence's keys are another one's in number."""
    keys = [draw.choice(n or 3, 0, 1, 2 * n + 1) for n in reversed(size.lengths)]
    of_keys = (sum(keys), draw.choice(size.heads, 1))
    shapes = {"q": (size.tokens, size.heads), "k": of_keys, "v": of_keys}
    return {
        **{name: draw.normal(*shape, size.head_dim) for name, shape in shapes.items()},
        "cu_seqlens_q": draw.offsets(size.lengths),
        "cu_seqlens_k": draw.offsets(keys),
        "max_seqlen_q": size.longest,
        "max_seqlen_k": max(size.longest, *keys, 0),
        "dropout_p": draw.choice(0.0, 0.0, 0.2),
        **_biases(size, sum(keys), draw),
    }


def _plain_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, key_bias=None, **biases: Any) -> Tensor:
    """PyTorch's attention, a sequence at a time, with explicit masks."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    biased = key_bias is not None or bool(biases)
    hidden = k.new_zeros(len(k)) if key_bias is None else key_bias
    parts = ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k), (hidden, cu_seqlens_k))
    outputs = []
    for *rows, bias in zip(*(sequences(*part) for part in parts), strict=True):
        sizes = len(rows[0]), len(rows[1])
        mask = masked_scores(*sizes, q, **biases, key_bias=bias) if biased else None
        one = [x.transpose(0, 1)[None] for x in rows]
        out = F.scaled_dot_product_attention(one[0], one[1], one[2], mask)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _plain(
    qkv, cu_seqlens, max_seqlen, dropout_p, softmax_scale, rotary=None, num_key_heads=None, **biases
) -> Tensor:
    q, k, v = _split((qkv,), num_key_heads)
    if rotary is not None:
        q, k = (rotated(x, rotary, cu_seqlens) for x in (q, k))
    return _plain_attention(q, k, v, cu_seqlens, cu_seqlens, **biases)


def _plain_cross(max_seqlen_q, max_seqlen_k, dropout_p, **inputs: Any) -> Tensor:
    return _plain_attention(**inputs)


def _attention_case(detail: str, more: Callable[[Size, Draw], dict[str, Any]]) -> None:
    """A case of sequences too long for the kernel of short ones."""
    inputs = lambda size, draw: {**_case_inputs(size, draw), **more(size, draw)}
    declare_case(attention, inputs, _plain, detail, resize=lambda size: size.at_least(130))


declare_case(attention, _case_inputs, _plain)
_attention_case("long", lambda size, draw: {})
_attention_case("window", lambda size, draw: {"window_size": (64, 32)})
_attention_case(
    "relative bias", lambda size, draw: {"relative_bias": draw.parameter(size.heads, 65)}
)
_attention_case(
    "ALiBi and key bias",
    lambda size, draw: {
        "alibi_slopes": draw.keep(2.0 ** -torch.arange(1, size.heads + 1)),
        "key_bias": draw.float32(size.tokens),
    },
)
_attention_case(
    "rotary",
    lambda size, draw: {"rotary": draw.keep(rotary_table(size.longest, size.head_dim))},
)


def _grouped_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    divisors = [n for n in range(1, size.heads) if size.heads % n == 0]
    key_heads = draw.choice(*(divisors or [1]))
    heads = size.heads + 2 * key_heads
    return {"qkv": draw.normal(size.tokens, heads, size.head_dim), "num_key_heads": key_heads}


_attention_case("grouped queries", _grouped_inputs)
declare_case(cross_attention, _cross_inputs, _plain_cross)
