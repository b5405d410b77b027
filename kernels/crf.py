"""Linear-chain CRF over packed sequences: likelihood, its gradient, and the best path.

    log P(y) = start[y_0] + sum_t e[t, y_t] + sum_t T[y_{t-1}, y_t] + end[y_last] - log Z,  by the forward recursion
    alpha_t[j] = log sum_i exp(alpha_{t-1}[i] + T[i, j]) + e[t, j]

Tiling: one program takes one sequence, token by token, with the whole of T in registers. A token costs one tile of
num_tags^2, and programs need no synchronisation. Each alpha_t is normalised, and the norms are kept, so that float32
keeps its precision in long sequences; log Z and the path's score are summed in float64. The backward goes from the last
token to the first with beta, which is normalised in the same way, and keeps the transitions' gradient in registers.
Program i of PROGRAMS takes the sequences i, i + PROGRAMS and so on. The programs' partial sums are added in a fixed
order, without atomics, so the result is deterministic.

Bytes per token, 4 num_tags each: forward reads emissions and writes alphas, backward reads both and writes the
gradient. The time is that of the chain of dependent tokens, not of the memory.
Source: Rabiner 1989; Viterbi 1967.
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor

PROGRAMS = 256  # of the backward; the same on every device, and so is the order of its sums
SEQUENCES = 32  # whose best paths one program traces back


@triton.jit
def _finite(value):
    """What may be subtracted from scores: 0 for -inf."""
    return tl.where(value == float("-inf"), 0.0, value)


@triton.jit
def _logarithm(sums, base):
    """log(sums) + base; -inf where a sum is 0."""
    nothing = sums == 0.0
    return tl.log(tl.where(nothing, 1.0, sums)) + tl.where(nothing, float("-inf"), base)


@triton.jit
def _log_sum_exp(scores, AXIS: tl.constexpr):
    base = _finite(tl.max(scores, AXIS))
    wide = base[None, :] if AXIS == 0 else base[:, None]
    return _logarithm(tl.sum(tl.exp(scores - wide), AXIS), base)


@triton.jit
def _log_sum(scores):
    """log sum exp of a vector."""
    base = _finite(tl.max(scores, 0))
    return _logarithm(tl.sum(tl.exp(scores - base), 0), base)


@triton.jit
def _bounds(cu_seqlens_ptr, seqused_ptr, sequence):
    """(first token, used length, whole length)."""
    first = tl.load(cu_seqlens_ptr + sequence)
    whole = tl.load(cu_seqlens_ptr + sequence + 1) - first
    length = whole if seqused_ptr is None else tl.load(seqused_ptr + sequence)
    return first, length, whole


@triton.jit
def _load_transitions(transitions_ptr, num_tags, BLOCK: tl.constexpr):
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (i < num_tags) & (j < num_tags)
    return tl.load(transitions_ptr + i * num_tags + j, mask=mask, other=float("-inf"))


@triton.jit(do_not_specialize=["num_tags"])
def _crf_fwd_kernel(
    emissions_ptr,  # (tokens, num_tags), float32
    tags_ptr,  # (tokens,), int64
    cu_seqlens_ptr,  # (batch+1,), int32
    seqused_ptr,  # (batch,), int32, or None
    start_ptr,  # (num_tags,), float32
    end_ptr,
    transitions_ptr,  # (num_tags, num_tags), float32
    likelihood_ptr,  # (batch,), float32
    alphas_ptr,  # (tokens, stride), float32: log-probabilities of the tags given the tokens so far
    norms_ptr,  # (tokens,), float32: what was subtracted for that
    num_tags,
    stride,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    first, length, _ = _bounds(cu_seqlens_ptr, seqused_ptr, sequence)
    if length == 0:
        tl.store(likelihood_ptr + sequence, 0.0)
        return
    tag = tl.arange(0, BLOCK)
    valid = tag < num_tags
    transitions = _load_transitions(transitions_ptr, num_tags, BLOCK)
    token = first.to(tl.int64)
    y = tl.load(tags_ptr + token)
    scores = tl.load(emissions_ptr + token * num_tags + tag, mask=valid, other=float("-inf"))
    scores += tl.load(start_ptr + tag, mask=valid, other=0.0)
    norm = _log_sum(scores)
    alpha = scores - _finite(norm)
    tl.store(alphas_ptr + token * stride + tag, alpha, mask=valid)
    tl.store(norms_ptr + token, norm)
    log_z = norm.to(tl.float64)
    path = tl.load(start_ptr + y) + tl.load(emissions_ptr + token * num_tags + y).to(tl.float64)
    for _ in tl.range(1, length):
        token += 1
        before = y
        y = tl.load(tags_ptr + token)
        path += tl.load(emissions_ptr + token * num_tags + y).to(tl.float64)
        path += tl.load(transitions_ptr + before * num_tags + y).to(tl.float64)
        e = tl.load(emissions_ptr + token * num_tags + tag, mask=valid, other=float("-inf"))
        scores = _log_sum_exp(alpha[:, None] + transitions, 0) + e
        norm = _log_sum(scores)
        alpha = scores - _finite(norm)
        tl.store(alphas_ptr + token * stride + tag, alpha, mask=valid)
        tl.store(norms_ptr + token, norm)
        log_z += norm.to(tl.float64)
    end = tl.load(end_ptr + tag, mask=valid, other=float("-inf"))
    log_z += _log_sum(alpha + end).to(tl.float64)
    path += tl.load(end_ptr + y).to(tl.float64)
    tl.store(likelihood_ptr + sequence, (path - log_z).to(tl.float32))


@triton.jit
def _emission_gradient(alphas_ptr, beta, weight, y, tag, valid):
    """weight * ((is it the tag?) - P(tag)) of one token."""
    joint = beta + tl.load(alphas_ptr, mask=valid, other=float("-inf"))
    marginal = tl.exp(joint - _finite(_log_sum(joint)))
    return weight * (tl.where(tag == y, 1.0, 0.0) - marginal)


@triton.jit(do_not_specialize=["num_tags", "batch"])
def _crf_bwd_kernel(
    weights_ptr,  # (batch,), float32: gradients of the likelihoods
    emissions_ptr,
    tags_ptr,
    cu_seqlens_ptr,
    seqused_ptr,
    end_ptr,
    transitions_ptr,
    alphas_ptr,
    demissions_ptr,  # (tokens, num_tags), float32
    dstart_ptr,  # (programs, num_tags), float32, as the next two
    dend_ptr,
    dtransitions_ptr,  # (programs, num_tags, num_tags)
    num_tags,
    stride,
    batch,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    tag = tl.arange(0, BLOCK)
    valid = tag < num_tags
    transitions = _load_transitions(transitions_ptr, num_tags, BLOCK)
    ends = tl.load(end_ptr + tag, mask=valid, other=float("-inf"))
    dstart = tl.zeros([BLOCK], tl.float32)
    dend = tl.zeros([BLOCK], tl.float32)
    dtransitions = tl.zeros([BLOCK, BLOCK], tl.float32)
    for sequence in tl.range(program, batch, tl.num_programs(0)):
        first, length, whole = _bounds(cu_seqlens_ptr, seqused_ptr, sequence)
        first = first.to(tl.int64)
        weight = tl.load(weights_ptr + sequence)
        for position in tl.range(length, whole):
            row = demissions_ptr + (first + position) * num_tags + tag
            tl.store(row, tl.zeros([BLOCK], tl.float32), mask=valid)
        beta = ends
        for back in tl.range(1, length):
            token = first + length - back
            y, before = tl.load(tags_ptr + token), tl.load(tags_ptr + token - 1)
            row = alphas_ptr + token * stride + tag
            gradient = _emission_gradient(row, beta, weight, y, tag, valid)
            tl.store(demissions_ptr + token * num_tags + tag, gradient, mask=valid)
            dend += tl.where(back == 1, gradient, 0.0)
            row = emissions_ptr + token * num_tags + tag
            onward = transitions + (beta + tl.load(row, mask=valid, other=float("-inf")))[None, :]
            row = alphas_ptr + (token - 1) * stride + tag
            alpha = tl.load(row, mask=valid, other=float("-inf"))
            beta = _log_sum_exp(onward, 1)
            norm = _finite(_log_sum(alpha + beta))
            beta -= _finite(tl.max(beta, 0))
            pairs = tl.exp(alpha[:, None] + onward - norm)
            stepped = (tag == before)[:, None] & (tag == y)[None, :]
            dtransitions += weight * (tl.where(stepped, 1.0, 0.0) - pairs)
        if length > 0:
            y = tl.load(tags_ptr + first)
            row = alphas_ptr + first * stride + tag
            gradient = _emission_gradient(row, beta, weight, y, tag, valid)
            tl.store(demissions_ptr + first * num_tags + tag, gradient, mask=valid)
            dstart += gradient
            dend += tl.where(length == 1, gradient, 0.0)
    tl.store(dstart_ptr + program * num_tags + tag, dstart, mask=valid)
    tl.store(dend_ptr + program * num_tags + tag, dend, mask=valid)
    indices = tag[:, None] * num_tags + tag[None, :]
    target = dtransitions_ptr + program * num_tags * num_tags + indices
    tl.store(target, dtransitions, mask=valid[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["num_tags"])
def _crf_best_kernel(
    emissions_ptr,
    cu_seqlens_ptr,
    seqused_ptr,
    start_ptr,
    end_ptr,
    transitions_ptr,
    pointers_ptr,  # (tokens, num_tags), uint8: the tag before on the best path to each
    last_ptr,  # (batch,), int32: the last tag
    scores_ptr,  # (batch,), float32
    num_tags,
    BLOCK: tl.constexpr,
):
    """The scores of the best paths, and the way back."""
    sequence = tl.program_id(0)
    first, length, _ = _bounds(cu_seqlens_ptr, seqused_ptr, sequence)
    if length == 0:
        tl.store(scores_ptr + sequence, 0.0)
        return
    tag = tl.arange(0, BLOCK)
    valid = tag < num_tags
    transitions = _load_transitions(transitions_ptr, num_tags, BLOCK)
    token = first.to(tl.int64)
    best = tl.load(emissions_ptr + token * num_tags + tag, mask=valid, other=float("-inf"))
    best += tl.load(start_ptr + tag, mask=valid, other=0.0)
    subtracted = tl.zeros([], tl.float64)
    for _ in tl.range(1, length):
        token += 1
        # Differences to the best so far, which keep float32's digits in long sequences.
        highest = _finite(tl.max(best, 0))
        subtracted += highest.to(tl.float64)
        arriving = (best - highest)[:, None] + transitions
        best, pointer = tl.max(arriving, 0, return_indices=True, return_indices_tie_break_left=True)
        best += tl.load(emissions_ptr + token * num_tags + tag, mask=valid, other=0.0)
        tl.store(pointers_ptr + token * num_tags + tag, pointer.to(tl.uint8), mask=valid)
    best += tl.load(end_ptr + tag, mask=valid, other=float("-inf"))
    score, last = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(scores_ptr + sequence, (subtracted + score.to(tl.float64)).to(tl.float32))
    tl.store(last_ptr + sequence, last)


@triton.jit(do_not_specialize=["num_tags", "batch"])
def _crf_back_kernel(
    cu_seqlens_ptr,
    seqused_ptr,
    pointers_ptr,
    last_ptr,
    path_ptr,  # (tokens,), int64
    num_tags,
    batch,
    SEQUENCES: tl.constexpr,
):
    """Follows the pointers of SEQUENCES sequences, one a lane; 0 where a token is unused."""
    sequence = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    mask = sequence < batch
    first = tl.load(cu_seqlens_ptr + sequence, mask=mask, other=0)
    whole = tl.load(cu_seqlens_ptr + sequence + 1, mask=mask, other=0) - first
    length = whole if seqused_ptr is None else tl.load(seqused_ptr + sequence, mask=mask, other=0)
    tag = tl.load(last_ptr + sequence, mask=mask, other=0)
    first = first.to(tl.int64)
    for back in tl.range(0, tl.max(tl.where(mask, whole, 0), 0)):
        position = whole - 1 - back
        used = mask & (position >= 0) & (position < length)
        tl.store(path_ptr + first + position, tl.where(used, tag, 0), mask=mask & (position >= 0))
        pointer = pointers_ptr + (first + position) * num_tags + tag
        tag = tl.load(pointer, mask=used & (position > 0), other=0).to(tl.int32) + tl.where(
            used, 0, tag
        )


def config(num_tags: int, backward: bool = False) -> dict:
    """Launch parameters; not tuned on a device yet.

    The backward keeps T, its gradient and a tile of pairs of tags in registers; with fewer warps it spills.
    """
    block = max(16, triton.next_power_of_2(num_tags))
    warps = {16: 2, 32: 8, 64: 16}[block] if backward else max(1, block * block // 1024)
    return {"BLOCK": block, "num_warps": warps}


def _contiguous(*values: Tensor | None) -> list[Tensor | None]:
    return [None if value is None else value.contiguous() for value in values]


def crf_forward(
    emissions: Tensor,
    tags: Tensor,
    cu_seqlens: Tensor,
    seqused: Tensor | None,
    start: Tensor,
    end: Tensor,
    transitions: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-likelihoods, alphas, norms) as the op fastenc::crf_fwd returns them, alphas and norms as logarithms."""
    tokens, num_tags = emissions.shape
    batch, stride = cu_seqlens.shape[0] - 1, triton.cdiv(num_tags, 16) * 16
    likelihood = emissions.new_empty(batch)
    alphas, norms = emissions.new_empty(tokens, stride), emissions.new_empty(tokens)
    arguments = _contiguous(emissions, tags, cu_seqlens, seqused, start, end, transitions)
    if batch:
        run(
            _crf_fwd_kernel,
            (batch,),
            *arguments,
            likelihood,
            alphas,
            norms,
            num_tags,
            stride,
            **config(num_tags),
        )
    return likelihood, alphas, norms


def crf_backward(
    weights: Tensor,
    emissions: Tensor,
    tags: Tensor,
    cu_seqlens: Tensor,
    seqused: Tensor | None,
    start: Tensor,
    end: Tensor,
    transitions: Tensor,
    alphas: Tensor,
    norms: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(demissions, dstart, dend, dtransitions) as the op fastenc::crf_bwd returns them."""
    num_tags, batch = emissions.shape[1], cu_seqlens.shape[0] - 1
    programs = min(PROGRAMS, batch)
    demissions = torch.empty_like(emissions, memory_format=torch.contiguous_format)
    dstart, dend = (emissions.new_empty(programs, num_tags) for _ in range(2))
    dtransitions = emissions.new_empty(programs, num_tags, num_tags)
    arguments = _contiguous(weights, emissions, tags, cu_seqlens, seqused, end, transitions, alphas)
    if batch:
        run(
            _crf_bwd_kernel,
            (programs,),
            *arguments,
            demissions,
            dstart,
            dend,
            dtransitions,
            num_tags,
            alphas.shape[1],
            batch,
            **config(num_tags, backward=True),
        )
    return demissions, dstart.sum(0), dend.sum(0), dtransitions.sum(0)


def crf_viterbi(
    emissions: Tensor,
    cu_seqlens: Tensor,
    seqused: Tensor | None,
    start: Tensor,
    end: Tensor,
    transitions: Tensor,
) -> tuple[Tensor, Tensor]:
    """(path, scores) as the op fastenc::crf_viterbi returns them."""
    tokens, num_tags = emissions.shape
    batch = cu_seqlens.shape[0] - 1
    path, scores = cu_seqlens.new_empty(tokens, dtype=torch.int64), emissions.new_empty(batch)
    if batch:
        pointers = cu_seqlens.new_empty((tokens, num_tags), dtype=torch.uint8)
        last = cu_seqlens.new_zeros(batch)
        arguments = _contiguous(emissions, cu_seqlens, seqused, start, end, transitions)
        run(
            _crf_best_kernel,
            (batch,),
            *arguments,
            pointers,
            last,
            scores,
            num_tags,
            **config(num_tags),
        )
        run(
            _crf_back_kernel,
            (triton.cdiv(batch, SEQUENCES),),
            *arguments[1:3],
            pointers,
            last,
            path,
            num_tags,
            batch,
            SEQUENCES=SEQUENCES,
            num_warps=1,
        )
    return path, scores
