"""Nearest vectors: exact, by blocked matrix products, or by an index library."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.progress import progress_bar

QUERIES_AT_ONCE = 1024
DOCUMENTS_AT_ONCE = 16_384


def exact_search(
    queries: Tensor, documents: Tensor, k: int, show_progress: bool | None = False
) -> tuple[Tensor, Tensor]:
    """The ``k`` documents of each query with the largest dot products, the largest first.

    A block of queries is multiplied with one block of documents after the other, so that no more than 1024 × 16,384
    products are in memory. They are computed in float32, because in bfloat16 many near documents would have equal
    products.

    Args:
        queries, documents: (queries, width) and (documents, width), floating point, on one device.
        k: at most the number of documents.
        show_progress: None shows a bar if stderr is a terminal.
    Returns: (float32 products, int64 indices of documents), each (queries, k).
    """
    best = []
    for block in progress_bar(queries.split(QUERIES_AT_ONCE), "searching", "block", show_progress):
        block = block.float()
        scores = block.new_empty((len(block), 0))
        indices = block.new_empty((len(block), 0), dtype=torch.int64)
        for start in range(0, len(documents), DOCUMENTS_AT_ONCE):
            products = block @ documents[start : start + DOCUMENTS_AT_ONCE].float().T
            near = products.topk(min(k, products.shape[1]), dim=1)
            scores = torch.cat((scores, near.values), dim=1)
            indices = torch.cat((indices, near.indices + start), dim=1)
            scores, order = scores.topk(min(k, scores.shape[1]), dim=1)
            indices = indices.gather(1, order)
        best.append((scores, indices))
    columns = list(zip(*best, strict=True))
    return torch.cat(columns[0]), torch.cat(columns[1])


def faiss_search(
    queries: Tensor, documents: Tensor, k: int, show_progress: bool | None = False
) -> tuple[Tensor, Tensor]:
    """:func:`exact_search` by faiss' flat index, on the CPU."""
    faiss = require("faiss", extra="search")
    index = faiss.IndexFlatIP(documents.shape[1])
    index.add(documents.float().cpu().numpy())
    scores, indices = index.search(queries.float().cpu().numpy(), k)
    return torch.from_numpy(scores), torch.from_numpy(indices)


def usearch_search(
    queries: Tensor, documents: Tensor, k: int, show_progress: bool | None = False
) -> tuple[Tensor, Tensor]:
    """:func:`exact_search` by usearch's graph (HNSW), which is approximate: it may miss a document.

    Where it reaches fewer than ``k`` documents, the last products of a row are -inf and their indices -1.
    """
    index = require("usearch.index", extra="search").Index(
        ndim=documents.shape[1], metric="ip", dtype="f32"
    )
    index.add(torch.arange(len(documents)).numpy(), documents.float().cpu().numpy())
    matches = index.search(queries.float().cpu().numpy(), k)
    scores = torch.full((len(queries), k), float("-inf"))
    indices = torch.full((len(queries), k), -1)
    for row, found in enumerate([matches] if len(queries) == 1 else matches):
        count = len(found)  # what usearch's arrays hold after these means nothing
        scores[row, :count] = 1 - torch.from_numpy(found.distances)
        indices[row, :count] = torch.from_numpy(found.keys).long()
    return scores, indices


SEARCHES: dict[str, Callable[..., Any]] = {
    "exact": exact_search,
    "faiss": faiss_search,
    "usearch": usearch_search,
}
