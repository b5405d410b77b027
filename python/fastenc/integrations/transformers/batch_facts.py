"""What the host must know of a padded batch before it can be packed, in one reading."""

from typing import NamedTuple

import torch
from torch import Tensor


class BatchFacts(NamedTuple):
    """Numbers of one call's attention mask and labels.

    Fields:
        total_tokens, max_seqlen: of the packed batch.
        padding: places of padding; leading_padding: rows that start with it.
        labelled: labels of tokens that are not -100; labelled_padding: those on padding.
    """

    total_tokens: int
    max_seqlen: int
    padding: int
    leading_padding: int
    labelled: int
    labelled_padding: int


def read_facts(mask: Tensor | None, labels: Tensor | None) -> BatchFacts | None:
    """Read them; on an accelerator this is the one place of a forward that waits for it.

    Args:
        mask: (batch, length), non-zero at real tokens. None, or another shape: there is nothing to read.
        labels: counted where they have the mask's shape, one a token.
    """
    if mask is None or mask.dim() != 2 or not mask.numel():
        return None
    if torch.jit.is_tracing() or torch.compiler.is_compiling():
        return None
    real = mask != 0
    lengths = real.sum(1)
    facts = [lengths.sum(), lengths.max(), (~real).sum(), (~real[:, 0]).sum()]
    if labels is not None and labels.shape == mask.shape:
        labelled = labels != -100
        facts += [labelled.sum(), (labelled & ~real).sum()]
    else:
        facts += [lengths.new_zeros(())] * 2
    return BatchFacts(*torch.stack(facts).tolist())
