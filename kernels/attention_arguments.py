"""The arguments and constants that attention's kernels for sequences of any length share."""

from fastenc.kernels.attention_call import AttentionCall
from fastenc.kernels.attention_qkv import head_constants
from fastenc.kernels.dropout import threshold_and_scale
from torch import Tensor

# Numbers that change from batch to batch. A second variant of each kernel for multiples of 16 would gain nothing.
VARYING = ["total_q", "blocks", "threshold", "span", "left", "right"]
UNLIMITED = 2**30  # tokens on a side of a window without a limit


def shared_arguments(q: Tensor, k: Tensor, v: Tensor, attention_call: AttentionCall) -> dict:
    """The arguments and constants that all kernels for any length share."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    threshold, drop_scale = threshold_and_scale(attention_call.dropout_p, attention_call.rng_state)
    heads = q.shape[1]
    cu_seqlens_k = (
        attention_call.cu_seqlens_q
        if attention_call.cu_seqlens_k is None
        else attention_call.cu_seqlens_k
    )
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "cu_seqlens_q_ptr": attention_call.cu_seqlens_q.contiguous(),
        "cu_seqlens_k_ptr": cu_seqlens_k.contiguous(),
        "rng_ptr": attention_call.rng_state if threshold else None,
        "alibi_ptr": contiguous(attention_call.alibi_slopes),
        "relative_ptr": contiguous(attention_call.relative_bias),
        "key_bias_ptr": contiguous(attention_call.key_bias),
        "stride_q_token": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_k_token": k.stride(0),
        "stride_k_head": k.stride(1),
        "stride_v_token": v.stride(0),
        "stride_v_head": v.stride(1),
        "total_q": q.shape[0],
        "scale": attention_call.scale,
        "threshold": threshold,
        "drop_scale": drop_scale,
        "span": 0
        if attention_call.relative_bias is None
        else attention_call.relative_bias.shape[1] // 2,
        "left": attention_call.window_left if attention_call.window_left >= 0 else UNLIMITED,
        "right": attention_call.window_right if attention_call.window_right >= 0 else UNLIMITED,
        "GROUP": heads // k.shape[1] if heads else 1,
        # The variant with a window scales the scores before it masks them and takes their maximum. A scale of 0 or
        # less needs that order.
        "WINDOW": max(attention_call.window_left, attention_call.window_right) >= 0
        or attention_call.scale <= 0,
        **head_constants(q),
    }


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def is_biased(arguments: dict) -> bool:
    """Whether there is a window or a bias."""
    biases = (arguments[name] for name in ("alibi_ptr", "relative_ptr", "key_bias_ptr"))
    return arguments["WINDOW"] or any(bias is not None for bias in biases)
