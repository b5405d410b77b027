"""Attention by cuDNN over packed sequences, through PyTorch. Only impl="cudnn" takes it: a peer and a fallback."""

import torch
from torch import Tensor

from fastenc.kernels.attention_call import AttentionCall
from fastenc.ops.derivatives import once_differentiable

# PyTorch's ops. torch.nn.attention.varlen has them as a backend that is switched off.
FORWARD = torch.ops.aten._cudnn_attention_forward.default
BACKWARD = torch.ops.aten._cudnn_attention_backward.default
# Fields of a call that cuDNN does not take.
NOT_TAKEN = ("alibi_slopes", "relative_bias", "key_bias", "rotary", "rng_state")
# The last version of PyTorch whose backward can mistake head_dim for max_seqlen. It then writes past a buffer if
# max_seqlen is larger (https://github.com/pytorch/pytorch/pull/186142).
LAST_WITH_SHORT_GRADIENTS = (2, 13)


def cudnn_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_call: AttentionCall,
    return_lse: bool,
) -> Tensor:
    """Attention of q, k and v (total_tokens, num_heads, head_dim), in float16 or bfloat16; differentiable.

    Returns: (total_tokens, num_heads, head_dim), dtype of q.
    Raises: ValueError saying why cuDNN cannot take the call.
    """
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    given = ["window_size"] * (
        (attention_call.window_left, attention_call.window_right) != (-1, -1)
    )
    given += [name for name in NOT_TAKEN if getattr(attention_call, name) is not None]
    given += ["return_lse"] * return_lse
    reason = _unsupported_reason(q, attention_call.max_seqlen_q, wants_grad, given)
    if reason is not None:
        raise ValueError(f"attention: impl='cudnn' cannot take this call: {reason}")
    numbers = (
        attention_call.cu_seqlens_q,
        attention_call.max_seqlen_q,
        attention_call.dropout_p,
        attention_call.scale,
    )
    return _CudnnAttention.apply(q, k, v, *numbers, wants_grad)


def _unsupported_reason(
    q: Tensor, max_seqlen: int, wants_grad: bool, given: list[str]
) -> str | None:
    head_dim = q.shape[2]
    if given:
        return f"it takes no {', '.join(given)}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 or bfloat16, got {q.dtype}"
    if head_dim % 8 or not 0 < head_dim <= 128:
        return f"head_dim must be a multiple of 8 up to 128, got {head_dim}"
    if not torch.backends.cudnn.is_available():
        return "this PyTorch has no cuDNN"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if wants_grad and max_seqlen > head_dim and version <= LAST_WITH_SHORT_GRADIENTS:
        return (
            f"its gradient in PyTorch {torch.__version__} takes sequences of at most head_dim = {head_dim} tokens, got "
            f"max_seqlen = {max_seqlen}"
        )
    return None


class _CudnnAttention(torch.autograd.Function):
    """The kernels need contiguous q, k, v and output gradient."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, max_seqlen, dropout_p, scale, wants_grad):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        offsets, longest = (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen)
        out, lse, _, _, _, _, seed, offset, _ = FORWARD(
            q, k, v, None, *offsets, *longest, wants_grad, dropout_p, False, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, seed, offset, cu_seqlens)
        ctx.max_seqlen, ctx.dropout_p, ctx.scale = max_seqlen, dropout_p, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        *saved, cu_seqlens = ctx.saved_tensors
        offsets, longest = (cu_seqlens, cu_seqlens), (ctx.max_seqlen, ctx.max_seqlen)
        grads = BACKWARD(
            dout.contiguous(),
            *saved,
            None,
            *offsets,
            *longest,
            ctx.dropout_p,
            False,
            scale=ctx.scale,
        )
        return (*grads, *(None,) * 5)
