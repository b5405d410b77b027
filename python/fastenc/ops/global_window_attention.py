"""Attention over a window and global tokens (Longformer).

The local queries see the keys in their window and the global keys in one softmax. The global queries are a call of
:func:`cross_attention`.
"""

from typing import Any

import torch
from torch import Tensor

from fastenc.kernels.attention_call import later_state
from fastenc.ops import checks
from fastenc.ops.attention import cross_attention
from fastenc.ops.cases import Draw, Size, declare_case, sequences
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.dispatch import choose, declare, head_limits
from fastenc.ops.library import define
from fastenc.packing import check_cu_seqlens, check_global_tokens
from fastenc.reference import global_window_attention as reference

OP = "global_window_attention"
declare(OP, "cpp", "triton")


def global_window_attention(
    qkv: Tensor,
    global_q: Tensor,
    global_kv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    global_tokens: Tensor,
    *,
    window_size: tuple[int, int],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    rng_state: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Non-causal attention inside each sequence of a packed batch, in which some tokens are global.

        local i:  out[i] = sum_j dropout(softmax_j(softmax_scale * q[i] . k[j])) v[j],
                  j over the tokens in i's window and all global tokens of i's sequence, each once
        global i: the same with global_q, global_k and global_v, j over all tokens of i's sequence

    Args:
        qkv: (total_tokens, 3, num_heads, head_dim), floating point. It is read in place if its last stride is 1.
        global_q: (G, num_heads, head_dim), dtype of qkv, the queries of the global tokens.
        global_kv: (total_tokens, 2, num_heads, head_dim), dtype of qkv, the keys and values that they see.
        cu_seqlens: int32 (batch+1,), offsets of the sequences from 0 to total_tokens.
        max_seqlen: host int, at least the longest sequence.
        global_tokens: int64 (G,), the global tokens' indices in the packed batch, ascending. On a GPU its values are
            not checked, because that would wait for the device.
        window_size: (left, right): the number of tokens that a local token sees on each side; -1 is no limit.
        dropout_p: probability of dropping a softmax weight, rounded to a multiple of 2^-16. Applied whenever
            positive: pass 0 in evaluation.
        softmax_scale: head_dim ** -0.5 if None.
        rng_state: int64 (2,), seed and offset of dropout's masks, on qkv's device. Weights of keys in the window have
            the mask of :func:`attention`; those of global keys, whose columns are counted among the global tokens, have
            the next offset, and those of global queries the one after it. None: random, from the device's default
            generator.
        impl: "auto", "cpp" (head_dim a multiple of 16 up to 128), "triton" (head_dim up to 128) or "reference".
    Returns: (total_tokens, num_heads, head_dim), dtype of qkv.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: fp32 arithmetic. Triton merges the results over the window and over the global keys, which in half
        precision are rounded before; its products of float32 are in TF32 if torch.backends.cuda.matmul allows it.
    Memory: O(total_tokens); nothing of size length x length or length x window is kept, and nothing is padded.
    Deterministic: yes, except Triton's backward, which is deterministic under torch.use_deterministic_algorithms.
    Differentiable: qkv, global_q, global_kv.
    Source: Beltagy et al. 2020, arXiv:2004.05150.
    """
    _check(qkv, global_q, global_kv)
    checks.check_device(OP, "cu_seqlens", cu_seqlens, qkv)
    check_cu_seqlens(cu_seqlens, qkv.shape[0], max_seqlen)
    checks.check_window(OP, window_size)
    checks.check_dropout(OP, dropout_p)
    checks.check_device(OP, "global_tokens", global_tokens, qkv)
    check_global_tokens(global_tokens, qkv.shape[0], f"{OP}: ")
    if global_q.shape[0] != global_tokens.shape[0]:
        raise ValueError(
            f"{OP}: global_q must have a row for each of the {global_tokens.shape[0]} global tokens, got "
            f"{global_q.shape[0]}"
        )
    rng_state = checks.mask_rng_state(OP, rng_state, dropout_p, qkv)
    states = () if rng_state is None else tuple(later_state(rng_state, n) for n in range(3))
    head_dim = qkv.shape[3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    cu_globals = offsets_of_globals(global_tokens, cu_seqlens)
    chosen = choose(
        OP,
        impl,
        qkv,
        **head_limits(head_dim),
        reference_cost="whose time and memory grow with the square of the longest sequence",
    )
    if chosen == "reference":
        return reference.global_window_attention(
            qkv,
            global_q,
            global_kv,
            cu_seqlens,
            max_seqlen,
            global_tokens,
            cu_globals,
            window_size=window_size,
            softmax_scale=scale,
            dropout_p=dropout_p,
            rng_states=states,
        )
    global_k, global_v = global_kv.unbind(1)
    of_globals = cross_attention(
        global_q,
        global_k,
        global_v,
        cu_globals,
        cu_seqlens,
        min(max_seqlen, global_tokens.shape[0]),
        max_seqlen,
        softmax_scale=scale,
        dropout_p=dropout_p,
        rng_state=states[2] if states else None,
        impl=chosen,
    )
    tensors = (global_tokens, cu_globals, cu_seqlens, rng_state)
    return local_attention(qkv, of_globals, *tensors, max_seqlen, dropout_p, scale, *window_size)


def offsets_of_globals(global_tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int32 (batch+1,): the offsets of the sequences among the global tokens."""
    return torch.searchsorted(global_tokens.contiguous(), cu_seqlens.long(), out_int32=True)


def local_attention(qkv: Tensor, of_globals: Tensor, *arguments: Any) -> Tensor:
    """The result of :func:`global_window_attention`, of which ``of_globals`` are the rows of the global tokens.

    Args: arguments: those of the kernels' schema after v.
    Differentiable: qkv, of_globals.
    """
    if torch.is_grad_enabled() and (qkv.requires_grad or of_globals.requires_grad):
        return _LocalAttention.apply(qkv, of_globals, *arguments)
    out, _ = torch.ops.fastenc.global_window_attention_fwd(*qkv.unbind(1), *arguments)
    return out.index_copy_(0, arguments[0], of_globals)


class _LocalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, of_globals, *arguments):
        out, lse = torch.ops.fastenc.global_window_attention_fwd(*qkv.unbind(1), *arguments)
        out.index_copy_(0, arguments[0], of_globals)
        # The backward computes the probabilities again.
        ctx.save_for_backward(out, lse, qkv, *arguments[:TENSORS])
        ctx.numbers = arguments[TENSORS:]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        out, lse, qkv, *tensors = ctx.saved_tensors
        dqkv, _ = torch.ops.fastenc.global_window_attention_bwd(
            dout, out, lse, *qkv.unbind(1), *tensors, *ctx.numbers, False
        )
        return dqkv, dout[tensors[0]], *(None,) * (TENSORS + len(ctx.numbers))


def _check(qkv: Tensor, global_q: Tensor, global_kv: Tensor) -> None:
    checks.check_qkv(OP, qkv)
    tokens, _, heads, head_dim = qkv.shape
    wanted = {
        "global_q": (global_q, (*global_q.shape[:1], heads, head_dim)),
        "global_kv": (global_kv, (tokens, 2, heads, head_dim)),
    }
    for name, (value, shape) in wanted.items():
        if tuple(value.shape) != tuple(shape) or value.dtype != qkv.dtype:
            named = f"({'G' if name == 'global_q' else tokens}, {', '.join(map(str, shape[1:]))})"
            raise ValueError(
                f"{OP}: {name} must have shape {named} and qkv's dtype {qkv.dtype}, got {value.dtype} of shape "
                f"{tuple(value.shape)}: project the same tokens to as many heads"
            )
        checks.check_device(OP, name, value, qkv)


TENSORS = 4
_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor global_tokens, Tensor cu_globals, Tensor cu_seqlens, Tensor? rng_state, "
    "SymInt max_seqlen, float dropout_p, float scale, SymInt window_left, SymInt window_right"
)


def _fake_forward(q, *rest):
    lse = q.new_empty((2, q.shape[1], q.shape[0]), dtype=torch.float32)
    return q.new_empty(q.shape), lse


def _fake_backward(dout, out, lse, q, *rest):
    dqkv = q.new_empty((q.shape[0], 3, *q.shape[1:]))
    columns = 3 * q.shape[1] * q.shape[2] if rest[-1] else 0
    return dqkv, q.new_empty(columns, dtype=torch.float32)


# The attention of the local queries. The rows of the global tokens in out are written by the caller.
# lse: (2, num_heads, tokens), of the keys of a query in two groups. Triton's groups are those in its window and the
# global ones; C++ has all keys in the first, and -inf for the second.
define(
    f"global_window_attention_fwd({_CALL}) -> (Tensor out, Tensor lse)",
    _fake_forward,
    triton="global_window_attention.global_window_attention_forward",
)
# Rows of dout at global tokens count as 0. wants_bias: return the gradient of the projection's bias too, the sum of
# dqkv over the tokens, float32 (3 * num_heads * head_dim,).
define(
    f"global_window_attention_bwd(Tensor dout, Tensor out, Tensor lse, {_CALL}, bool wants_bias) -> (Tensor dqkv, "
    "Tensor dbias)",
    _fake_backward,
    triton="global_window_attention.global_window_attention_backward",
)


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    tokens = size.tokens
    chosen = draw.integers(8, tokens) < draw.choice(1, 0, 3, 8)
    indices = chosen.nonzero().flatten()
    shape = (size.heads, size.head_dim)
    return {
        "qkv": draw.normal(tokens, 3, *shape),
        "global_q": draw.normal(len(indices), *shape),
        "global_kv": draw.normal(tokens, 2, *shape),
        "cu_seqlens": draw.offsets(size.lengths),
        "max_seqlen": size.longest,
        "global_tokens": indices,
        "window_size": draw.choice((32, 32), (0, 0), (2, 3), (-1, 4)),
        "dropout_p": draw.choice(0.0, 0.0, 0.2),
        "softmax_scale": draw.choice(None, 0.3),
    }


def _plain(
    qkv,
    global_q,
    global_kv,
    cu_seqlens,
    max_seqlen,
    global_tokens,
    window_size,
    dropout_p,
    softmax_scale,
) -> Tensor:
    """A sequence at a time, with all scores and two masks."""
    scale, outputs = qkv.shape[3] ** -0.5, []
    is_global = torch.zeros(len(qkv), dtype=torch.bool, device=qkv.device)
    is_global[global_tokens] = True
    wide_q = torch.zeros_like(qkv[:, 0]).index_copy(0, global_tokens, global_q)
    parts = (qkv, wide_q, global_kv, is_global)
    for local, of_global, seen, chosen in zip(
        *(sequences(x, cu_seqlens) for x in parts), strict=True
    ):
        position = torch.arange(len(local), device=qkv.device)
        distance = position - position[:, None]
        left, right = (n if n >= 0 else len(local) for n in window_size)
        visible = ((distance >= -left) & (distance <= right)) | chosen
        q, k, v = local.transpose(0, 2).unbind(1)  # each (num_heads, length, head_dim)
        gk, gv = seen.transpose(0, 2).unbind(1)
        scores = (scale * (q @ k.mT)).masked_fill(~visible, float("-inf"))
        everywhere = (scale * (of_global.transpose(0, 1) @ gk.mT)).softmax(2) @ gv
        out = torch.where(chosen[:, None], everywhere, scores.softmax(2) @ v)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


declare_case(global_window_attention, _case_inputs, _plain, resize=lambda size: size.at_least(130))
