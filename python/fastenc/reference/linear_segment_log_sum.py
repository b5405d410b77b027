"""Sums of log(1 + ReLU) of a linear layer's outputs over each packed sequence, in plain torch."""

import torch
from torch import Tensor


def linear_segment_log_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: str = "relu",
) -> Tensor:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(wide) @ weight.to(wide).T
    if bias is not None:
        logits = logits + bias.to(wide)
    batch, lengths = cu_seqlens.shape[0] - 1, cu_seqlens.diff().long()
    sequence = torch.repeat_interleave(
        torch.arange(batch, device=hidden.device), lengths, output_size=hidden.shape[0]
    )
    values = logits.new_zeros((batch, logits.shape[1]))
    logarithms = logits.relu().log1p()
    if activation == "log1p_relu":
        logarithms = logarithms.log1p()
    return values.index_add(0, sequence, logarithms).to(hidden.dtype)
