"""What attention heads look at, without their probabilities in memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastenc.ops import _checks
from fastenc.ops._dispatch import choose, declare
from fastenc.ops._library import define
from fastenc.packing import check_cu_seqlens
from fastenc.reference import head_statistics as reference

declare("head_statistics", "cpp", "triton")


class HeadStatistics(NamedTuple):
    """Of the probabilities p[i, j] of each query i and head, (total_tokens, num_heads) each.

    Fields:
        entropy: -Σ_j p[i, j] ln p[i, j], in nats; 0 for a single key, ln(length) for equal ones.
        distance: Σ_j p[i, j] |j - i|, in tokens.
        first, last: p of the sequence's first token ([CLS]) and last token ([SEP]).
        itself, previous, next: p of the token itself and of its neighbours; 0 where there is none.
        target: p of the key given for this query; 0 without one.
        strongest: int32, place in the sequence of the key with the highest p, of equals the first.
    """

    entropy: Tensor
    distance: Tensor
    first: Tensor
    last: Tensor
    itself: Tensor
    previous: Tensor
    next: Tensor
    target: Tensor
    strongest: Tensor


NAMES = HeadStatistics._fields[:-1]


def head_statistics(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    targets: Tensor | None = None,
    skip_ends: bool = False,
    softmax_scale: float | None = None,
    impl: str = "auto",
) -> HeadStatistics:
    """Statistics of p[i, j] = softmax_j(softmax_scale * q[i] . k[j]), j over i's sequence, for each query and head.

    Args:
        q, k: (total_tokens, num_heads, head_dim), floating point of one dtype; views of a packed qkv are read in place.
        cu_seqlens: int32 (batch+1,), offsets of the sequences from 0 to total_tokens.
        max_seqlen: host int, at least the longest sequence.
        targets: int32 (total_tokens,), place in its sequence of the key that each query is asked about, or -1.
        skip_ends: look for the strongest key between a sequence's first and last token, which are special ones; of a
            sequence of at most two tokens among all.
        softmax_scale: head_dim ** -0.5 if None.
        impl: "auto", "cpp" (head_dim a multiple of 16 up to 128), "triton" (head_dim up to 128) or "reference".
    Returns: :class:`HeadStatistics`; float32, in float64 that (reference).
    Raises: ValueError stating rule, received value, remedy.
    Numerics: fp32 arithmetic. Memory: C++ and Triton keep nothing of size length x length. Deterministic: yes.
    Differentiable: no.
    Source: Clark et al. 2019, arXiv:1906.04341; Vig and Belinkov 2019, arXiv:1906.04284.
    """
    if q.dim() != 3 or not q.is_floating_point() or k.shape != q.shape or k.dtype != q.dtype:
        raise ValueError(
            "head_statistics: q and k must be floating point of one dtype and shape (total_tokens, num_heads, "
            f"head_dim), got {q.dtype} {tuple(q.shape)} and {k.dtype} {tuple(k.shape)}"
        )
    _checks.check_device("head_statistics", "k", k, q)
    _checks.check_device("head_statistics", "cu_seqlens", cu_seqlens, q)
    check_cu_seqlens(cu_seqlens, q.shape[0], max_seqlen)
    if targets is not None:
        if targets.dtype != torch.int32 or targets.shape != q.shape[:1]:
            raise ValueError(
                f"head_statistics: targets must be int32 of shape ({q.shape[0]},), a place for each query or -1, got "
                f"{targets.dtype} of shape {tuple(targets.shape)}"
            )
        _checks.check_device("head_statistics", "targets", targets, q)
        _check_targets(targets, cu_seqlens)
    head_dim = q.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if not scale > 0:
        raise ValueError(f"head_statistics: softmax_scale must be positive, got {scale}")
    cpp_limit = triton_limit = None
    if head_dim % 16 or not 0 < head_dim <= 128:
        cpp_limit = f"head_dim must be a multiple of 16 up to 128, got {head_dim}"
    if not 0 < head_dim <= 128:
        triton_limit = f"head_dim must be at most 128, got {head_dim}"
    chosen = choose("head_statistics", impl, q, cpp_limit=cpp_limit, triton_limit=triton_limit)
    q, k = q.detach(), k.detach()
    if chosen == "reference":
        statistics, strongest = reference.head_statistics(
            q, k, cu_seqlens, targets, scale, skip_ends
        )
    else:
        statistics, strongest = torch.ops.fastenc.head_statistics(
            q, k, cu_seqlens, targets, max_seqlen, scale, skip_ends
        )
    named = dict(zip(NAMES, statistics.unbind(-1), strict=True))
    return HeadStatistics(**named, strongest=strongest)


def _check_targets(targets: Tensor, cu_seqlens: Tensor) -> None:
    """Values are read only on CPU tensors; on an accelerator that would wait for the device."""
    if targets.device.type != "cpu" or torch.compiler.is_compiling():
        return
    lengths = cu_seqlens.diff().repeat_interleave(cu_seqlens.diff().long())
    wrong = (targets < -1) | (targets >= lengths)
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise ValueError(
            f"head_statistics: a target must be a place in its sequence of {int(lengths[place])} tokens, or -1, got "
            f"{int(targets[place])} for token {place}"
        )


def _fake(q, k, cu_seqlens, targets, max_seqlen, scale, skip_ends):
    shape = q.shape[:2]
    return (
        q.new_empty((*shape, len(NAMES)), dtype=torch.float32),
        q.new_empty(shape, dtype=torch.int32),
    )


define(
    "head_statistics(Tensor q, Tensor k, Tensor cu_seqlens, Tensor? targets, SymInt max_seqlen, float scale, "
    "bool skip_ends) -> (Tensor statistics, Tensor strongest)",
    _fake,
    triton="head_statistics.head_statistics",
)
