"""The maxima of a linear layer's outputs over each packed sequence, in plain torch."""

import torch
from torch import Tensor

from fastenc.reference.segment_pool import first_maximum


def linear_segment_max(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(wide) @ weight.to(wide).T
    if bias is not None:
        logits = logits + bias.to(wide)
    lengths = cu_seqlens.diff().long()
    argmax = first_maximum(logits.detach(), lengths)
    # An empty sequence takes the row of zeros after the last token.
    padded = torch.cat([logits, logits.new_zeros((1, logits.shape[1]))])
    values = padded.gather(0, argmax).to(hidden.dtype)
    return values, torch.where(lengths[:, None] > 0, argmax, -1).int()
