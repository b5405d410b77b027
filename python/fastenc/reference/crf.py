"""The linear-chain CRF in plain torch."""

from collections.abc import Iterator

import torch
from torch import Tensor


def _bounds(cu_seqlens: Tensor, seqused: Tensor | None = None) -> Iterator[tuple[int, int]]:
    """(begin, end of the used tokens) of each sequence."""
    begins = cu_seqlens[:-1]
    stops = cu_seqlens[1:] if seqused is None else begins + seqused
    return zip(begins.tolist(), stops.tolist(), strict=True)


def log_likelihood(
    emissions: Tensor,
    tags: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    end: Tensor,
    transitions: Tensor,
    seqused: Tensor | None = None,
) -> Tensor:
    """log P(tags) of each sequence (batch,), float32, or float64 for float64 emissions.

    Arguments as in fastenc.ops.crf_log_likelihood.
    """
    dtype = torch.promote_types(emissions.dtype, torch.float32)
    start, end, transitions = (value.to(dtype) for value in (start, end, transitions))
    results = []
    for first, stop in _bounds(cu_seqlens, seqused):
        if first == stop:
            results.append(emissions.new_zeros((), dtype=dtype))
            continue
        e, y = emissions[first:stop].to(dtype), tags[first:stop]
        score = start[y[0]] + end[y[-1]] + e.gather(1, y[:, None]).sum()
        score = score + transitions[y[:-1], y[1:]].sum()
        alpha = start + e[0]
        for row in e[1:]:
            alpha = torch.logsumexp(alpha[:, None] + transitions, 0) + row
        results.append(score - torch.logsumexp(alpha + end, 0))
    return torch.stack(results) if results else emissions.new_zeros((0,), dtype=dtype)


def decode(
    emissions: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    end: Tensor,
    transitions: Tensor,
    seqused: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(tags of the best paths (total_tokens,), 0 where unused; their scores (batch,)), by Viterbi's algorithm in
    float64; arguments as in fastenc.ops.crf_decode."""
    path = torch.zeros(emissions.shape[0], dtype=torch.int64, device=emissions.device)
    scores = []
    start, end, transitions = (value.double() for value in (start, end, transitions))
    for first, stop in _bounds(cu_seqlens, seqused):
        if first == stop:
            scores.append(emissions.new_zeros((), dtype=torch.float32))
            continue
        e = emissions[first:stop].double()
        best, pointers = start + e[0], []
        for row in e[1:]:
            highest, pointer = (best[:, None] + transitions).max(0)
            best = highest + row
            pointers.append(pointer)
        score, tag = (best + end).max(0)
        scores.append(score.float())
        path[stop - 1] = tag
        for token, pointer in zip(range(stop - 2, first - 1, -1), reversed(pointers), strict=True):
            tag = pointer[tag]
            path[token] = tag
    return path, torch.stack(scores) if scores else emissions.new_zeros((0,), dtype=torch.float32)


def decode_nbest(
    emissions: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    end: Tensor,
    transitions: Tensor,
    n: int,
) -> tuple[Tensor, Tensor]:
    """(tags of the n best paths (n, total_tokens), their scores (n, batch)), best first, computed in float64.

    A sequence with fewer paths has tags -1 and score -infinity. Arguments as in fastenc.ops.crf_decode_nbest.
    """
    paths = torch.full((n, emissions.shape[0]), -1, dtype=torch.int64, device=emissions.device)
    scores = torch.full((n, len(cu_seqlens) - 1), -torch.inf, device=emissions.device)
    start, end, transitions = (value.double() for value in (start, end, transitions))
    for number, (first, stop) in enumerate(_bounds(cu_seqlens)):
        if first == stop:
            scores[0, number] = 0.0
            continue
        e = emissions[first:stop].double()
        best = (start + e[0])[:, None]  # (tags, partial paths kept): scores, best first
        # For each later token (tags, partial paths): previous tag * width + rank of its partial path; and the width.
        pointers = []
        for row in e[1:]:
            arriving = (best[:, :, None] + transitions[:, None, :]).flatten(0, 1)
            ordered = arriving.sort(dim=0, descending=True, stable=True)
            pointers.append((ordered.indices[:n].t(), best.shape[1]))
            best = ordered.values[:n].t() + row[:, None]
        ordered = (best + end[:, None]).flatten().sort(descending=True, stable=True)
        for k, (score, chosen) in enumerate(
            zip(ordered.values[:n].tolist(), ordered.indices[:n].tolist(), strict=True)
        ):
            if score == -torch.inf:
                break
            scores[k, number] = score
            tag, rank = divmod(chosen, best.shape[1])
            paths[k, stop - 1] = tag
            for t, (pointer, width) in zip(
                range(stop - 2, first - 1, -1), reversed(pointers), strict=True
            ):
                tag, rank = divmod(int(pointer[tag, rank]), width)
                paths[k, t] = tag
    return paths, scores
