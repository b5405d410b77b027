"""Attention over packed sequences."""

import torch
from torch import Tensor

from fastenc.ops import _checks
from fastenc.ops._dispatch import choose
from fastenc.ops._library import define
from fastenc.packing import check_cu_seqlens
from fastenc.reference import attention as reference


def attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Non-causal attention inside each sequence of a packed batch.

        out[i] = sum_j dropout(softmax_j(softmax_scale * q[i] . k[j])) v[j],  j over i's sequence

    Args:
        qkv: (total_tokens, 3, num_heads, head_dim), floating point; read in place, whatever its strides, as
            long as the last one is 1.
        cu_seqlens: int32 (batch+1,), offsets of the sequences from 0 to total_tokens.
        max_seqlen: host int, at least the longest sequence.
        dropout_p: probability of dropping a softmax weight, rounded to a multiple of 2^-16. Applied whenever
            positive: pass 0 in evaluation. The mask comes from the device's default generator.
        softmax_scale: head_dim ** -0.5 if None.
        impl: "auto", "cpp" (head_dim a multiple of 16 up to 128), "triton" (head_dim up to 128) or "reference".
    Returns: (total_tokens, num_heads, head_dim), dtype of qkv.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: fp32 arithmetic. Memory: nothing of size length x length is kept. Deterministic: yes; Triton's
    backward only under torch.use_deterministic_algorithms, for it is slower. Differentiable: qkv.
    Source: Vaswani et al. 2017, arXiv:1706.03762.
    """
    if qkv.dim() != 4 or qkv.shape[1] != 3 or not qkv.is_floating_point():
        raise ValueError(
            "attention: qkv must be floating point of shape (total_tokens, 3, num_heads, head_dim), "
            f"got {qkv.dtype} of shape {tuple(qkv.shape)}: view the fused projection's output that way"
        )
    _checks.check_device("attention", "cu_seqlens", cu_seqlens, qkv)
    check_cu_seqlens(cu_seqlens, qkv.shape[0], max_seqlen)
    _checks.check_dropout("attention", dropout_p)
    head_dim = qkv.shape[3]
    cpp_limit = triton_limit = None
    if head_dim % 16 or not 0 < head_dim <= 128:
        cpp_limit = f"head_dim must be a multiple of 16 up to 128, got {head_dim}"
    if not 0 < head_dim <= 128:
        triton_limit = f"head_dim must be at most 128, got {head_dim}"
    chosen = choose("attention", impl, qkv, cpp_limit=cpp_limit, triton_limit=triton_limit)
    seed = _checks.draw_seed(qkv.device) if dropout_p > 0 else None
    if chosen == "reference":
        return reference.attention(
            qkv, cu_seqlens, dropout_p=dropout_p, seed=seed, softmax_scale=softmax_scale
        )
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if torch.is_grad_enabled() and qkv.requires_grad:
        return _Attention.apply(qkv, cu_seqlens, max_seqlen, seed, dropout_p, scale)
    return torch.ops.fastenc.attention_fwd(qkv, cu_seqlens, max_seqlen, seed, dropout_p, scale)[0]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cu_seqlens, max_seqlen, seed, dropout_p, scale):
        out, lse = torch.ops.fastenc.attention_fwd(
            qkv, cu_seqlens, max_seqlen, seed, dropout_p, scale
        )
        # The backward forms the probabilities again; on a CPU from qkv alone.
        ctx.save_for_backward(qkv, cu_seqlens, seed, out if lse.numel() else None, lse)
        ctx.rest = (max_seqlen, dropout_p, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        qkv, cu_seqlens, seed, out, lse = ctx.saved_tensors
        max_seqlen, dropout_p, scale = ctx.rest
        dqkv = torch.ops.fastenc.attention_bwd(
            dout, qkv, out, lse, cu_seqlens, max_seqlen, seed, dropout_p, scale
        )
        return dqkv, None, None, None, None, None


def _fake_forward(qkv, cu_seqlens, max_seqlen, seed, dropout_p, scale):
    tokens, _, heads, head_dim = qkv.shape
    lse_shape = (heads, tokens) if qkv.device.type == "cuda" else (0,)
    return qkv.new_empty((tokens, heads, head_dim)), qkv.new_empty(lse_shape, dtype=torch.float32)


def _fake_backward(dout, qkv, out, lse, cu_seqlens, max_seqlen, seed, dropout_p, scale):
    return qkv.new_empty(qkv.shape)


define(
    "attention_fwd(Tensor qkv, Tensor cu_seqlens, SymInt max_seqlen, Tensor? seed, float dropout_p, float scale) "
    "-> (Tensor, Tensor)",
    _fake_forward,
    triton="attention.attention_forward",
)
define(
    "attention_bwd(Tensor dout, Tensor qkv, Tensor? out, Tensor lse, Tensor cu_seqlens, SymInt max_seqlen, "
    "Tensor? seed, float dropout_p, float scale) -> Tensor",
    _fake_backward,
    triton="attention.attention_backward",
)
