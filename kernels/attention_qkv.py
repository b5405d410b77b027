"""q, k and v of packed sequences, as the kernels of several attentions take them."""

import torch
import triton
from torch import Tensor


def qkv_arguments(q: Tensor, k: Tensor, v: Tensor) -> dict:
    """Arguments and constants of kernels that read q, k and v with the same strides."""
    if q.stride(2) != 1 or not q.stride() == k.stride() == v.stride():
        q, k, v = (x.contiguous() for x in (q, k, v))
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "stride_token": q.stride(0),
        "stride_head": q.stride(1),
        "total_q": q.shape[0],
        **head_constants(q),
    }


def head_constants(q: Tensor) -> dict:
    """The number of heads, their columns, and the precision of products."""
    heads, head_dim = q.shape[1:]
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "H": heads,
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),  # tl.dot takes no less than 16
        "PRECISION": "tf32" if tf32 else "ieee",
    }


def precision_of(arguments: dict) -> str:
    """The precision of the launch rules: "half" for 2-byte types, else that of float32 products."""
    return arguments["PRECISION"] if arguments["q_ptr"].dtype == torch.float32 else "half"
