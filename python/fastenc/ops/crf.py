"""Linear-chain conditional random field over packed sequences: likelihood, marginals, best paths."""

from collections.abc import Callable
from operator import gt, sub
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc._base import debug
from fastenc.ops import checks
from fastenc.ops.cases import Draw, Size, declare_case, widened
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.dispatch import choose, declare
from fastenc.ops.library import define
from fastenc.packing import check_cu_seqlens
from fastenc.reference import crf as reference

declare("crf", "cpp", "triton")
declare("crf_log_likelihood", "cpp", "triton")
declare("crf_marginals", "cpp", "triton")
declare("crf_decode", "cpp", "triton")
declare("crf_decode_nbest", "cpp")

TRITON_MAX_TAGS = 64  # so that transitions and their gradient fit in registers


def crf_log_likelihood(
    emissions: Tensor,
    tags: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    end: Tensor,
    transitions: Tensor,
    *,
    seqused: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Log-probability of each sequence's tags.

        log P(y) = score(y) - log sum_y' exp(score(y'))
        score(y) = start[y_0] + sum_t emissions[t, y_t] + sum_t transitions[y_{t-1}, y_t] + end[y_last]

    Args:
        emissions: (total_tokens, num_tags), floating point.
        tags: int64 (total_tokens,), in [0, num_tags).
        cu_seqlens: int32 (batch+1,), offsets of the sequences from 0 to total_tokens.
        start, end: floating point (num_tags,), scores of the first and the last tag.
        transitions: floating point (num_tags, num_tags), score of row's tag followed by column's tag. -infinity or a
            large negative number in these three forbids the tag or transition.
        seqused: int32 (batch,), the number of tokens of each sequence that are used, counted from its first. The other
            tokens are not read, and their gradient is 0. None: all. So a right-padded batch needs no packing: pass its
            rows as sequences and their lengths as seqused.
        impl: "auto", "cpp", "triton" (at most 64 tags) or "reference".
    Returns: float32 (batch,); 0 for an empty sequence.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: fp32. C++ computes with normalised probabilities if no two transition scores differ by more than 60, else
        with logarithms. Triton computes with normalised logarithms.
    Deterministic: yes. Differentiable, once: emissions, start, end, transitions.
    Source: Lafferty et al. 2001, "Conditional random fields"; Rabiner 1989 for the rescaling.
    """
    _check(emissions, cu_seqlens, start, end, transitions, seqused)
    _check_tags(tags, emissions, cu_seqlens, seqused)
    if _choose(impl, emissions) == "reference":
        return reference.log_likelihood(
            emissions, tags, cu_seqlens, start, end, transitions, seqused
        )
    emissions, start, end, transitions = (
        value.float() for value in (emissions, start, end, transitions)
    )
    arguments = (emissions, tags, cu_seqlens, seqused, start, end, transitions)
    if torch.is_grad_enabled() and any(
        value.requires_grad for value in (emissions, start, end, transitions)
    ):
        return _LogLikelihood.apply(*arguments)
    return torch.ops.fastenc.crf_fwd(*arguments)[0]


def crf_marginals(
    emissions: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    end: Tensor,
    transitions: Tensor,
    *,
    impl: str = "auto",
) -> Tensor:
    """P(y_t = k) for every token t and tag k, not differentiable.

    Arguments, errors and numerics as :func:`crf_log_likelihood`, without seqused.
    Returns: float32 (total_tokens, num_tags).
    """
    # The gradient of a path's log-likelihood by the emissions is onehot(y_t)[k] - P(y_t = k), for any path.
    # Copies are needed, because a tensor that was made in inference mode has no gradient.
    with torch.inference_mode(False), torch.enable_grad():
        leaf = emissions.detach().to(torch.float32, copy=True).requires_grad_()
        tags = torch.zeros(emissions.shape[:1], dtype=torch.int64, device=emissions.device)
        offsets, *parameters = (x.detach().clone() for x in (cu_seqlens, start, end, transitions))
        likelihood = crf_log_likelihood(leaf, tags, offsets, *parameters, impl=impl)
        if not leaf.numel():  # autograd has no gradient to return
            return leaf.detach()
        (gradient,) = torch.autograd.grad(likelihood.sum(), leaf)
    marginals = -gradient
    marginals[:, 0] += 1
    return marginals


def crf_decode(
    emissions: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    end: Tensor,
    transitions: Tensor,
    *,
    seqused: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Each sequence's path of highest score, by the Viterbi algorithm. Ties go to the lowest tag at each step.

    Arguments and errors as :func:`crf_log_likelihood`.
    Returns: (tags int64 (total_tokens,), 0 where unused; scores of the paths float32 (batch,)).
    Source: Viterbi 1967.
    """
    _check(emissions, cu_seqlens, start, end, transitions, seqused)
    if _choose(impl, emissions) == "reference":
        return reference.decode(emissions, cu_seqlens, start, end, transitions, seqused)
    with torch.no_grad():
        parameters = (value.float() for value in (start, end, transitions))
        return torch.ops.fastenc.crf_viterbi(emissions.float(), cu_seqlens, seqused, *parameters)


def crf_decode_nbest(
    emissions: Tensor,
    cu_seqlens: Tensor,
    start: Tensor,
    end: Tensor,
    transitions: Tensor,
    n: int,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Each sequence's n paths of highest score, best first: Viterbi's algorithm with n partial paths for every tag.

    Arguments and errors as :func:`crf_log_likelihood`, without seqused; n: at least 1, n * num_tags at most 2^24.
    Time grows with n^2 and memory with n.
    Returns: (tags int64 (n, total_tokens), scores of the paths float32 (n, batch)). A sequence with fewer than n
        allowed paths has tag -1 and score -infinity in the remaining ones.
    Source: Forney 1973, "The Viterbi algorithm"; Seshadri and Sundberg 1994, "List Viterbi decoding algorithms".
    """
    _check(emissions, cu_seqlens, start, end, transitions)
    if not 1 <= n <= 2**24 // emissions.shape[1]:
        raise ValueError(
            f"crf: n must be from 1 to {2**24 // emissions.shape[1]} for {emissions.shape[1]} tags, got {n}"
        )
    limit = "it finds the best path only, not the n best"
    if choose("crf", impl, emissions, triton_limit=limit) == "reference":
        return reference.decode_nbest(emissions, cu_seqlens, start, end, transitions, n)
    with torch.no_grad():
        parameters = (value.float() for value in (start, end, transitions))
        return torch.ops.fastenc.crf_nbest(emissions.float(), cu_seqlens, *parameters, n)


def _choose(impl: str, emissions: Tensor) -> str:
    tags = emissions.shape[1]
    limit = f"num_tags must be at most {TRITON_MAX_TAGS}, got {tags}"
    return choose("crf", impl, emissions, triton_limit=limit if tags > TRITON_MAX_TAGS else None)


def _check(emissions, cu_seqlens, start, end, transitions, seqused=None) -> None:
    if emissions.dim() != 2 or not emissions.is_floating_point() or not emissions.shape[1]:
        raise ValueError(
            "crf: emissions must be floating point of shape (total_tokens, num_tags), "
            f"got {emissions.dtype} of shape {tuple(emissions.shape)}: pack the sequences first"
        )
    checks.check_device("crf", "cu_seqlens", cu_seqlens, emissions)
    check_cu_seqlens(cu_seqlens, emissions.shape[0], emissions.shape[0])
    if seqused is not None:
        _check_used(seqused, cu_seqlens)
    for name, value in (("start", start), ("end", end)):
        checks.check_vector("crf", name, value, emissions)
    num_tags = emissions.shape[1]
    if transitions.shape != (num_tags, num_tags):
        raise ValueError(
            f"crf: transitions must have shape ({num_tags}, {num_tags}), one row and column a tag, "
            f"got {tuple(transitions.shape)}"
        )
    checks.check_parameter("crf", "transitions", transitions, emissions)


def _check_used(seqused: Tensor, cu_seqlens: Tensor) -> None:
    if seqused.dtype != torch.int32 or seqused.shape != (cu_seqlens.shape[0] - 1,):
        raise ValueError(
            f"crf: seqused must be int32 of shape ({cu_seqlens.shape[0] - 1},), one number a sequence, "
            f"got {seqused.dtype} of shape {tuple(seqused.shape)}"
        )
    checks.check_device("crf", "seqused", seqused, cu_seqlens)
    if not debug.may_read(seqused):
        return
    offsets = cu_seqlens.tolist()
    lengths, used = list(map(sub, offsets[1:], offsets)), seqused.tolist()
    if used and (min(used) < 0 or any(map(gt, used, lengths))):
        wrong = next(i for i, n in enumerate(used) if not 0 <= n <= lengths[i])
        raise ValueError(
            f"crf: seqused must be from 0 to each sequence's length, got {used[wrong]} for sequence {wrong} "
            f"of {lengths[wrong]} tokens"
        )


def _check_tags(
    tags: Tensor, emissions: Tensor, cu_seqlens: Tensor, seqused: Tensor | None
) -> None:
    tokens, num_tags = emissions.shape
    if tags.shape != (tokens,) or tags.dtype != torch.int64:
        raise ValueError(
            f"crf: tags must be int64 of shape ({tokens},), one a token, got {tags.dtype} of shape {tuple(tags.shape)}"
        )
    checks.check_device("crf", "tags", tags, emissions)
    if not debug.may_read(tags) or not tokens:
        return
    low, high = (int(value) for value in tags.aminmax())
    if (low < 0 or high >= num_tags) and seqused is not None:  # unused tokens may have any tag
        position = torch.arange(tokens, device=tags.device) - cu_seqlens[:-1].repeat_interleave(
            cu_seqlens.diff()
        )
        used = tags[position < seqused.repeat_interleave(cu_seqlens.diff())]
        low, high = (int(value) for value in used.aminmax()) if used.numel() else (0, 0)
    if low < 0 or high >= num_tags:
        raise ValueError(
            f"crf: tags must be in [0, {num_tags}), got {low if low < 0 else high}: "
            "a CRF has no ignored tokens, leave them out of the packed sequences"
        )


class _LogLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        likelihood, alphas, norms = torch.ops.fastenc.crf_fwd(*arguments)
        ctx.save_for_backward(*arguments, alphas, norms)
        return likelihood

    @staticmethod
    @once_differentiable
    def backward(ctx, dlikelihood):
        demissions, *others = torch.ops.fastenc.crf_bwd(dlikelihood, *ctx.saved_tensors)
        return demissions, None, None, None, *others


def _fake_forward(emissions, tags, cu_seqlens, seqused, start, end, transitions):
    tokens, num_tags = emissions.shape
    stride = (num_tags + 15) // 16 * 16
    floats = lambda *shape: emissions.new_empty(shape, dtype=torch.float32)
    return floats(cu_seqlens.shape[0] - 1), floats(tokens, stride), floats(tokens)


def _fake_backward(weights, emissions, *others):
    num_tags = emissions.shape[1]
    floats = lambda *shape: emissions.new_empty(shape, dtype=torch.float32)
    return floats(*emissions.shape), floats(num_tags), floats(num_tags), floats(num_tags, num_tags)


def _fake_viterbi(emissions, cu_seqlens, seqused, start, end, transitions):
    path = emissions.new_empty(emissions.shape[:1], dtype=torch.int64)
    return path, emissions.new_empty((cu_seqlens.shape[0] - 1,), dtype=torch.float32)


def _fake_nbest(emissions, cu_seqlens, start, end, transitions, n):
    paths = emissions.new_empty((n, emissions.shape[0]), dtype=torch.int64)
    return paths, emissions.new_empty((n, cu_seqlens.shape[0] - 1), dtype=torch.float32)


define(
    "crf_fwd(Tensor emissions, Tensor tags, Tensor cu_seqlens, Tensor? seqused, Tensor start, Tensor end, "
    "Tensor transitions) -> (Tensor, Tensor, Tensor)",
    _fake_forward,
    triton="crf.crf_forward",
)
define(
    "crf_bwd(Tensor weights, Tensor emissions, Tensor tags, Tensor cu_seqlens, Tensor? seqused, Tensor start, "
    "Tensor end, Tensor transitions, Tensor alphas, Tensor norms) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_backward,
    triton="crf.crf_backward",
)
define(
    "crf_viterbi(Tensor emissions, Tensor cu_seqlens, Tensor? seqused, Tensor start, Tensor end, "
    "Tensor transitions) -> (Tensor, Tensor)",
    _fake_viterbi,
    triton="crf.crf_viterbi",
)
define(
    "crf_nbest(Tensor emissions, Tensor cu_seqlens, Tensor start, Tensor end, Tensor transitions, int n) "
    "-> (Tensor, Tensor)",
    _fake_nbest,
)


def _scores(size: Size, draw: Draw, make: Callable[..., Tensor]) -> dict[str, Any]:
    tags = draw.choice(9, 1, 2, 5, 17, 33)
    return {
        "emissions": make(size.tokens, tags),
        "cu_seqlens": draw.offsets(size.lengths),
        "start": make(tags),
        "end": make(tags),
        "transitions": make(tags, tags),
    }


def _used(size: Size, draw: Draw) -> Tensor | None:
    """``seqused``: a number of tokens for each sequence, at most its length; None: all of them."""
    longest = torch.tensor(size.lengths, device=draw.device, dtype=torch.int64)
    used = draw.integers(2**30, len(size.lengths)) % (longest + 1)
    return draw.choice(None, used.int())


def _likelihood_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    scores = _scores(size, draw, draw.parameter)
    tags = draw.integers(len(scores["start"]), size.tokens)
    return {**scores, "tags": tags, "seqused": _used(size, draw)}


def _decoded_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    return {**_scores(size, draw, draw.constant), "seqused": _used(size, draw)}


def _plain_likelihood(emissions, start, end, transitions, tags, cu_seqlens, seqused) -> Tensor:
    return reference.log_likelihood(emissions, tags, cu_seqlens, start, end, transitions)


def _plain_marginals(emissions, start, end, transitions, cu_seqlens) -> Tensor:
    """onehot(y) minus the gradient of the log-likelihood of any tags y by the emissions."""
    leaf = widened(emissions.detach()).requires_grad_()
    tags = cu_seqlens.new_zeros(len(leaf), dtype=torch.int64)
    with torch.enable_grad():
        likelihood = reference.log_likelihood(leaf, tags, cu_seqlens, start, end, transitions)
    (gradient,) = torch.autograd.grad(likelihood.sum(), leaf)
    return F.one_hot(tags, len(start)) - gradient


# Several paths can have one score, which alone is compared.
declare_case(crf_log_likelihood, _likelihood_inputs, _plain_likelihood)
declare_case(crf_marginals, lambda size, draw: _scores(size, draw, draw.constant), _plain_marginals)
declare_case(crf_decode, _decoded_inputs, None, result=lambda paths: paths[1])
declare_case(
    crf_decode_nbest,
    lambda size, draw: {**_scores(size, draw, draw.constant), "n": draw.choice(3, 1, 2, 5)},
    None,
    result=lambda paths: paths[1],
)
