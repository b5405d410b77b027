"""Scores of spans of words, a span at a time."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def boundary_scores(
    words: Tensor,
    spans: Sequence[tuple[int, int]],
    start: Tensor,
    end: Tensor,
    content: Tensor,
    bias: Tensor,
    out: Tensor,
    out_bias: Tensor,
    attention: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """out · gelu([start end content] · [h_i; h_j; c] + bias + lengths[j - i]) + out_bias of each span (i, j).

    c is the mean of h_i … h_j, or their sum with the weights softmax(attention · h_t) over t = i … j.

    Args:
        words: (W, hidden); start, end, content: (size, hidden); attention: (hidden,); out: (classes, size).
    Returns: (spans, classes).
    """
    rows = []
    for i, j in spans:
        inside = words[i : j + 1]
        scores = inside.new_zeros(j + 1 - i) if attention is None else inside @ attention
        mixed = scores.softmax(0) @ inside
        state = start @ words[i] + end @ words[j] + content @ mixed + bias
        if lengths is not None:
            state = state + lengths[j - i]
        rows.append(out @ F.gelu(state) + out_bias)
    return torch.stack(rows)


def biaffine_scores(
    words: Tensor,
    spans: Sequence[tuple[int, int]],
    start: Tensor,
    end: Tensor,
    start_bias: Tensor,
    end_bias: Tensor,
    bilinear: Tensor,
) -> Tensor:
    """[s_i; 1] · bilinear_m · [e_j; 1] for each class m of each span (i, j), s and e of networks of their own:

        s_i = gelu(start · h_i + start_bias),   e_j = gelu(end · h_j + end_bias)

    Args:
        words: (W, hidden); start, end: (size, hidden); bilinear: (classes, size + 1, size + 1), the first side the
            end's.
    Returns: (spans, classes).
    """
    one = words.new_ones(1)
    rows = []
    for i, j in spans:
        s = torch.cat([F.gelu(start @ words[i] + start_bias), one])
        e = torch.cat([F.gelu(end @ words[j] + end_bias), one])
        rows.append(torch.stack([e @ matrix @ s for matrix in bilinear]))
    return torch.stack(rows)
