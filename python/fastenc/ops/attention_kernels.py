"""The ops of attention that kernels compute, and their gradient."""

import torch
from torch import Tensor

from fastenc.kernels.attention_call import TENSORS, AttentionCall
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.library import define

FIELDS, RELATIVE_BIAS = len(AttentionCall._fields), AttentionCall._fields.index("relative_bias")


def attend_with_kernels(
    qkv: tuple[Tensor, ...], attention_call: AttentionCall, num_key_heads: int | None
) -> tuple[Tensor, Tensor]:
    """The output and softmax_lse by the kernel of the tensors' device, with a gradient where one is wanted.

    Args: qkv, num_key_heads: as :func:`split_qkv` takes them.
    """
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
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*qkv, relative_bias)
    ):
        return _Attention.apply(*attention_call, num_key_heads, *qkv)
    return torch.ops.fastenc.attention_fwd(*split_qkv(qkv, num_key_heads), *attention_call)


def split_qkv(qkv: tuple[Tensor, ...], num_key_heads: int | None) -> tuple[Tensor, ...]:
    """q, k and v, given apart or as one tensor that holds all three, without a copy.

    Args: num_key_heads: None if that tensor is (total_tokens, 3, num_heads, head_dim).
    """
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
        q, k, v = split_qkv(qkv, ctx.num_key_heads)
        out, lse = torch.ops.fastenc.attention_fwd(q, k, v, *attention_call)
        # The backward computes the probabilities again.
        ctx.save_for_backward(out, lse, *attention_call.tensors(), *qkv)
        ctx.attention_call = attention_call.without_tensors()
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        out, lse, *rest = ctx.saved_tensors
        attention_call, qkv = ctx.attention_call.with_tensors(rest[:TENSORS]), rest[TENSORS:]
        wants_relative_bias = ctx.needs_input_grad[RELATIVE_BIAS]
        *grads, drelative_bias, _ = torch.ops.fastenc.attention_bwd(
            torch.zeros_like(out) if dout is None else dout,
            dlse,
            out,
            lse,
            *split_qkv(qkv, ctx.num_key_heads),
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
    triton="sequence_bounds.sequence_bounds",
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
