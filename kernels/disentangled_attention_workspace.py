"""The gradients of the scores, ds, which disentangled attention's backward stores: where they are, and how many.

By pair, those of a query are a row over the keys of its sequence. By distance, (t, d) is at t * width + d, where t is a
token. So a tile of tokens and distances is a plain strided tile. The rows of such tiles overlap in memory, but no two
stored numbers do: a token has one distance to each token of its sequence, and width is above the number of these.

The workspace holds as many heads as fit into WORKSPACE bytes, at least one; the others follow.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from fastenc.kernels.disentangled_attention_tile import VARYING
from torch import Tensor

# The arguments that change from batch to batch, for the kernels that take as many heads as the workspace holds.
VARYING_HEADS = [*VARYING, "first_head", "stride_pairs", "stride_distances", "width"]
# Elements. Strides of the workspace are given in this unit, so that the compiler knows that rows are aligned.
UNIT = tl.constexpr(16)
WORKSPACE = 256 * 2**20  # bytes
# Tokens of the largest block. It may touch as many distances beyond the longest sequence.
MARGIN = 128


@triton.jit
def store_by_distance(base, first, start_own, start_other, ds, length, width, BLOCK: tl.constexpr):
    """ds: own rows by other rows, from these of the sequence on, whose first token is ``first``."""
    offsets = tl.arange(0, BLOCK)
    base += (first + start_own).to(tl.int64) * width + (start_other - start_own)
    valid = (offsets < length - start_own)[:, None] & (offsets < length - start_other)[None, :]
    tl.store(base + (offsets[:, None] * (width - 1) + offsets[None, :]), ds, mask=valid)


@triton.jit
def load_by_distance(base, own, distance, length, width, MASKED: tl.constexpr):
    """ds of own rows by distance, 0 where there is no such pair; base: of the sequence's first token.

    MASKED: whether some distance may lead out of the sequence.
    """
    pointers = base + own.to(tl.int64)[:, None] * width + distance[None, :]
    ds = tl.load(pointers, mask=(own < length)[:, None], other=0.0)
    if MASKED:
        other = own[:, None] + distance[None, :]
        ds = tl.where((other >= 0) & (other < length), ds, 0.0)
    return ds


class Workspace(NamedTuple):
    """Room for the gradients of the scores of some heads.

    Fields:
        heads: the number of heads that it holds.
        strides: arguments of the kernels that read or write it.
        by_pair: (heads, total_q, stride_pairs): ds of query and key.
        by_query: (heads, stride_distances): ds of query and distance, or None.
        by_key: (heads, stride_distances): ds of key and minus distance, or None.
    """

    heads: int
    strides: dict[str, int]
    by_pair: Tensor
    by_query: Tensor | None
    by_key: Tensor | None


def new_workspace(q: Tensor, longest: int, has_keys: bool, has_queries: bool) -> Workspace:
    """has_keys, has_queries: which of the two tables of positions there are."""
    tokens, heads = q.shape[:2]
    # ``before``: a block may read distances before those of the first token, and behind those of the last.
    unit = UNIT.value
    width, before = triton.cdiv(longest + 1, unit), triton.cdiv(longest + 2 * MARGIN, unit)
    stride_distances = tokens * width + 2 * before
    stride_pairs = triton.cdiv(longest, MARGIN) * (MARGIN // unit)
    elements = (tokens * stride_pairs + (has_keys + has_queries) * stride_distances) * unit
    passes = triton.cdiv(heads, max(1, WORKSPACE // (elements * q.element_size())))
    of_pass = triton.cdiv(heads, passes)
    by_pair = q.new_empty((of_pass, tokens, stride_pairs * unit))
    by_query, by_key = (
        q.new_empty((of_pass, stride_distances * unit))[:, before * unit :] if has else None
        for has in (has_keys, has_queries)
    )
    return Workspace(
        of_pass,
        {"width": width, "stride_distances": stride_distances, "stride_pairs": stride_pairs},
        by_pair,
        by_query,
        by_key,
    )
