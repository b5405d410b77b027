"""MaxSim: how near texts are that have a vector for each of their tokens."""

import torch
from torch import Tensor


def max_sim(query: Tensor, vectors: Tensor, lengths: Tensor) -> Tensor:
    """The late interaction of a query with packed documents, in plain PyTorch.

        score[d] = sum_i max_j q_i . v_j,   j over document d

    Args:
        query: (tokens, width), floating point.
        vectors: (total_tokens, width), those of all documents one after the other (``torch.cat``), query's dtype.
        lengths: int64 (documents,), the number of each document's vectors, at least 1.
    Returns: (documents,), query's dtype. Divided by the number of the query's tokens it is BGE-M3's score.
    Raises: ValueError for lengths that are not those of the vectors. Their values are read, which waits for a GPU.
    Differentiable: query and vectors.
    Source: Khattab and Zaharia 2020, arXiv:2004.12832.
    """
    counts = lengths.tolist()
    if min(counts, default=1) < 1 or sum(counts) != len(vectors):
        raise ValueError(
            f"lengths must be at least 1 and add up to the {len(vectors)} vectors, got {counts[:8]} with the sum "
            f"{sum(counts)}: leave out documents without vectors"
        )
    products = vectors @ query.T
    if counts:  # torch cannot reduce no segments
        products = torch.segment_reduce(products, "max", lengths=lengths, axis=0)
    return products.sum(1)
