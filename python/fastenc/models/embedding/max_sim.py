"""MaxSim: how near texts are that have a vector for each of their tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastenc.ops import linear_segment_max


def max_sim(query: Tensor, documents: Sequence[Tensor]) -> Tensor:
    """The late interaction of a query with documents, without padding.

        score[d] = sum_i max_j q_i . d_j

    On a CPU the products are compared tile by tile (:func:`fastenc.ops.linear_segment_max`) and never stored.

    Args:
        query: (tokens, width), floating point.
        documents: (tokens, width) for each document, query's dtype and device, none of them empty.
    Returns: (documents,), query's dtype. Divided by the number of the query's tokens it is BGE-M3's score.
    Raises: ValueError for no documents, an empty one, and what :func:`fastenc.ops.linear_segment_max` says.
    Differentiable: both.
    Source: Khattab and Zaharia 2020, arXiv:2004.12832.
    """
    lengths = [len(each) for each in documents]
    if not lengths or 0 in lengths:
        raise ValueError(
            f"max_sim needs documents with at least one vector each, got lengths {lengths[:8]}: leave out empty ones"
        )
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(query.device)
    return linear_segment_max(torch.cat([*documents]), query, None, ends)[0].sum(1)
