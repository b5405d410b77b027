"""First token, mean or maximum of each packed sequence, in plain torch."""

import torch
from torch import Tensor


def segment_pool(x: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    tokens, starts = x.shape[0], cu_seqlens[:-1].long()
    lengths = cu_seqlens.diff().long()
    if mode == "mean":
        # unsafe=True skips a check that would read the lengths back to the host.
        sums = torch.segment_reduce(wide, "sum", lengths=lengths, axis=0, unsafe=True)
        return (sums / lengths.clamp(min=1).unsqueeze(1)).to(x.dtype)
    # An empty sequence takes the row of zeros after the last token.
    padded = torch.cat([wide, wide.new_zeros((1, x.shape[1]))])
    if mode == "cls":
        return padded.index_select(0, torch.where(lengths > 0, starts, tokens)).to(x.dtype)
    return padded.gather(0, first_maximum(wide.detach(), lengths)).to(x.dtype)


def first_maximum(x: Tensor, lengths: Tensor) -> Tensor:
    """int64 (batch, hidden_size): index of the first token with the sequence's maximum; NaN counts as the largest."""
    tokens = x.shape[0]
    row = torch.arange(tokens, device=x.device)
    sequence = torch.repeat_interleave(
        torch.arange(len(lengths), device=x.device), lengths, output_size=tokens
    )
    largest = torch.segment_reduce(x, "max", lengths=lengths, axis=0, unsafe=True)[sequence]
    reaches = (x == largest) | x.isnan()
    candidates = torch.where(reaches, row.unsqueeze(1), tokens)
    first = torch.full((len(lengths), x.shape[1]), tokens, device=x.device)
    return first.scatter_reduce(0, sequence.unsqueeze(1).expand_as(candidates), candidates, "amin")
