"""Statistics of attention heads' probabilities, computed without storing the probabilities."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._base import debug
from fastenc.ops import checks
from fastenc.ops.cases import Draw, Size, declare_case, masked_scores, sequences, widened
from fastenc.ops.dispatch import choose, declare, head_limits
from fastenc.ops.library import define
from fastenc.packing import check_cu_seqlens
from fastenc.reference import head_statistics as reference

declare("head_statistics", "cpp", "triton")


class HeadStatistics(NamedTuple):
    """Statistics of the probabilities p[i, j] for each query i and head, each (total_tokens, num_heads).

    Fields (float32, unless stated):
        entropy: -Σ_j p[i, j] ln p[i, j], in nats: 0 if one key has p = 1, ln(length) if all keys have the same p.
        distance: Σ_j p[i, j] |j - i|, in tokens.
        first, last: p of the sequence's first token ([CLS]) and last token ([SEP]).
        itself, previous, next: p of the token itself and of its neighbours; 0 for a neighbour that does not exist.
        target: p of the key that ``targets`` gives for this query; 0 without one.
        strongest: int32, position in the sequence of the key with the highest p; ties go to the first.
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
    window_size: tuple[int, int] = (-1, -1),
    relative_bias: Tensor | None = None,
    impl: str = "auto",
) -> HeadStatistics:
    """Statistics of attention's probabilities for each query and head.

        p[i, j] = softmax_j(softmax_scale * q[i] . k[j] + relative_bias[j - i]),  j over i's sequence and window

    A key outside the window has p = 0. If the model has rotary positions, rotate q and k before (:func:`rotary`).

    Args:
        q, k: (total_tokens, num_heads, head_dim), floating point of one dtype; views of a packed qkv are read in place.
        cu_seqlens: int32 (batch+1,), offsets of the sequences from 0 to total_tokens.
        max_seqlen: host int, at least the longest sequence.
        targets: int32 (total_tokens,): for each query the position in its sequence of the key whose p goes to
            ``target``, or -1.
        skip_ends: exclude the sequence's first and last token, which are special tokens, from ``strongest``; a query
            that sees no other key excludes none.
        softmax_scale: head_dim ** -0.5 if None.
        window_size: (left, right): the number of tokens that a token sees on each side; -1 is no limit.
        relative_bias: floating point (num_heads, 2 * R + 1), as :func:`attention` takes it.
        impl: "auto", "cpp" (head_dim a multiple of 16 up to 128), "triton" (head_dim up to 128) or "reference".
    Returns: :class:`HeadStatistics`; for float64 input (impl="reference") in float64.
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
    checks.check_device("head_statistics", "k", k, q)
    checks.check_device("head_statistics", "cu_seqlens", cu_seqlens, q)
    check_cu_seqlens(cu_seqlens, q.shape[0], max_seqlen)
    if targets is not None:
        if targets.dtype != torch.int32 or targets.shape != q.shape[:1]:
            raise ValueError(
                f"head_statistics: targets must be int32 of shape ({q.shape[0]},), a position for each query or -1, "
                f"got {targets.dtype} of shape {tuple(targets.shape)}"
            )
        checks.check_device("head_statistics", "targets", targets, q)
        _check_targets(targets, cu_seqlens)
    head_dim = q.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if not scale > 0:
        raise ValueError(f"head_statistics: softmax_scale must be positive, got {scale}")
    checks.check_window("head_statistics", window_size)
    checks.check_relative_bias("head_statistics", relative_bias, q)
    chosen = choose("head_statistics", impl, q, **head_limits(head_dim))
    q, k = q.detach(), k.detach()
    bias = None if relative_bias is None else relative_bias.detach()
    if chosen == "reference":
        statistics, strongest = reference.head_statistics(
            q, k, cu_seqlens, targets, scale, skip_ends, window_size, bias
        )
    else:
        bias = None if bias is None else bias.float()
        statistics, strongest = torch.ops.fastenc.head_statistics(
            q, k, cu_seqlens, targets, bias, max_seqlen, scale, *window_size, skip_ends
        )
    named = dict(zip(NAMES, statistics.unbind(-1), strict=True))
    return HeadStatistics(**named, strongest=strongest)


def _check_targets(targets: Tensor, cu_seqlens: Tensor) -> None:
    """Raise ValueError for a target outside its sequence, where ``debug.may_read`` allows it."""
    if not debug.may_read(targets):
        return
    lengths = cu_seqlens.diff().repeat_interleave(cu_seqlens.diff().long())
    wrong = (targets < -1) | (targets >= lengths)
    if wrong.any():
        token = int(wrong.nonzero()[0])
        raise ValueError(
            f"head_statistics: a target must be a position in its sequence of {int(lengths[token])} tokens, or -1, got "
            f"{int(targets[token])} for token {token}"
        )


def _fake(q, k, *rest):
    shape = q.shape[:2]
    return (
        q.new_empty((*shape, len(NAMES)), dtype=torch.float32),
        q.new_empty(shape, dtype=torch.int32),
    )


define(
    "head_statistics(Tensor q, Tensor k, Tensor cu_seqlens, Tensor? targets, Tensor? relative_bias, SymInt max_seqlen, "
    "float scale, SymInt window_left, SymInt window_right, bool skip_ends) -> (Tensor statistics, Tensor strongest)",
    _fake,
    triton="head_statistics.head_statistics",
)


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    shape = (size.tokens, size.heads, size.head_dim)
    table = draw.constant(size.heads, 2 * draw.choice(32, 0, 7) + 1)
    return {
        "q": draw.constant(*shape),
        "k": draw.constant(*shape),
        "cu_seqlens": draw.offsets(size.lengths),
        "max_seqlen": size.longest,
        "skip_ends": draw.choice(False, True),
        "window_size": draw.choice((-1, -1), (2, 3), (0, 0), (-1, 40)),
        "relative_bias": draw.choice(None, table),
    }


def _biased_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    table = draw.constant(size.heads, 65)
    return {**_case_inputs(size, draw), "window_size": (64, 64), "relative_bias": table}


def _plain(q, k, cu_seqlens, window_size, relative_bias, **options: Any) -> Tensor:
    """The first seven statistics from explicit probabilities, one sequence at a time."""
    statistics = []
    for q_rows, k_rows in zip(sequences(q, cu_seqlens), sequences(k, cu_seqlens), strict=True):
        length = len(q_rows)
        if length == 0:
            continue
        scores = torch.einsum("ihd,jhd->hij", widened(q_rows), widened(k_rows))
        scores = scores * q.shape[2] ** -0.5
        scores = scores + masked_scores(
            length, length, scores, window_size, relative_bias=relative_bias
        )
        p = scores.softmax(-1)
        around = F.pad(p, (1, 1))
        positions = torch.arange(length, device=q.device)
        columns = (
            torch.special.entr(p).sum(-1),
            (p * (positions - positions[:, None]).abs()).sum(-1),
            p[..., 0],
            p[..., -1],
            *(around.diagonal(offset, 1, 2) for offset in (1, 0, 2)),
        )
        rows = torch.stack([column[:, :length] for column in columns], -1)
        statistics.append(rows.transpose(0, 1))
    return torch.cat(statistics)


def _stacked(statistics: HeadStatistics) -> Tensor:
    """But "target", which is empty, and "strongest": of equal probabilities any may be the strongest."""
    return torch.stack(statistics[:7], -1)


declare_case(head_statistics, _case_inputs, _plain, result=_stacked)
declare_case(
    head_statistics,
    _biased_inputs,
    _plain,
    "window and relative bias",
    result=_stacked,
    resize=lambda size: size.at_least(130),
)
