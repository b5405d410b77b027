"""Batches and peers of the attention tests."""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastenc.ops import attention, cross_attention
from fastenc.reference.attention import attention as reference

EDGE_LENGTHS = (1, 0, 63, 64, 65, 127, 128, 129, 2)


def offsets_of(lengths):
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def packed(lengths, heads, dim, dtype=torch.float32):
    qkv = torch.randn(sum(lengths), 3, heads, dim).to(dtype).requires_grad_()
    return qkv, offsets_of(lengths), max(lengths, default=0)


def small_call(**change):
    """Valid arguments of attention, with some of them changed."""
    qkv, cu_seqlens = torch.zeros(6, 3, 2, 16), torch.tensor([0, 3, 6]).int()
    return {"qkv": qkv, "cu_seqlens": cu_seqlens, "max_seqlen": 3, **change}


def plain(qkv, lengths, **options):
    """PyTorch's own attention, a sequence at a time."""
    return plain_cross(*qkv.unbind(1), lengths, lengths, **options)


def plain_cross(
    q, k, v, lengths_q, lengths_k, window=(-1, -1), slopes=None, relative=None, key_bias=None
):
    """The same for separate tensors, with an explicit mask that adds window and biases."""
    outputs = []
    if key_bias is None:
        key_bias = q.new_zeros(k.shape[0])
    biases = key_bias.split(list(lengths_k))
    parts = (x.split(list(n)) for x, n in ((q, lengths_q), (k, lengths_k), (v, lengths_k)))
    for q_part, k_part, v_part, bias in zip(*parts, biases, strict=True):
        queries, keys = len(q_part), len(k_part)
        indices = partial(torch.arange, device=q.device)
        distance = indices(keys) - indices(queries)[:, None] - (keys - queries)
        mask = bias.to(q.dtype).expand(q.shape[1], queries, keys)
        if slopes is not None:
            mask = mask - slopes.to(q.dtype)[:, None, None] * distance.abs()
        if relative is not None:
            span = relative.shape[1] // 2
            mask = mask + relative.to(q.dtype)[:, distance.clamp(-span, span) + span]
        left, right = (n if n >= 0 else keys + queries for n in window)
        mask = mask.masked_fill((distance < -left) | (distance > right), float("-inf"))
        # The backends differ in the result of a query that sees no key: here 0.
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (q_part, k_part, v_part)), attn_mask=mask
            )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def truth(qkv, cu_seqlens, longest, **options):
    """The reference for packed qkv."""
    return reference(*qkv.unbind(1), cu_seqlens, cu_seqlens, longest, longest, **options)[0]


class Case(NamedTuple):
    """Lengths, and the features that are used; relative: the span of the table of relative biases."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...] | None = None  # None: packed qkv
    window: tuple[int, int] = (-1, -1)
    alibi: bool = False
    relative: int | None = None
    key_bias: bool = False


CASES = {
    "window": Case((1, 0, 70, 129), window=(5, 20)),
    "window of one side": Case((3, 70), window=(-1, 0)),
    "window past everything": Case((3, 70), window=(200, 150)),
    "alibi": Case((1, 0, 70), alibi=True),
    "relative": Case((1, 0, 65, 130), relative=16),
    "relative past every distance": Case((5, 70), relative=100),
    "relative of three entries": Case((40, 25), relative=1),
    "key bias": Case((1, 0, 70), key_bias=True),
    "relative, key bias, window": Case((66, 5), window=(40, 3), relative=8, key_bias=True),
    "alibi, window": Case((70, 2), window=(0, 65), alibi=True),
    "cross": Case((1, 0, 65, 20, 5), (70, 4, 20, 0, 129)),
    "cross, window, alibi": Case((70, 3, 5), (9, 80, 0), window=(3, 10), alibi=True),
    "cross, relative, key bias": Case((70, 3, 5, 2), (9, 140, 0, 2), relative=30, key_bias=True),
    # T5's decoder: whole targets, and one token with a cache
    "causal, relative": Case((70, 1), (70, 66), window=(-1, 0), relative=16),
    "cross without keys": Case((4, 2), (0, 0), relative=3, key_bias=True),
}


class Inputs(NamedTuple):
    """The arguments of a case; tensors whose gradient is checked are leaves."""

    qkv: tuple[Tensor, ...]  # (qkv,) or (q, k, v)
    relative: Tensor | None
    slopes: Tensor | None
    key_bias: Tensor | None
    cu_seqlens: tuple[Tensor, ...]
    max_seqlens: tuple[int, ...]

    def leaves(self) -> list[Tensor]:
        return [*self.qkv] if self.relative is None else [*self.qkv, self.relative]

    def options(self, case: Case) -> dict:
        return {
            "window_size": case.window,
            "alibi_slopes": self.slopes,
            "relative_bias": self.relative,
            "key_bias": self.key_bias,
        }

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same in another dtype, with leaves of its own."""
        leaf = lambda x: x.detach().to(dtype).requires_grad_()
        return self._replace(
            qkv=tuple(map(leaf, self.qkv)),
            relative=None if self.relative is None else leaf(self.relative),
        )


def inputs_of(case: Case, heads: int, dim: int, dtype=torch.float32, device="cpu") -> Inputs:
    lengths_k = case.lengths_k or case.lengths_q
    leaf = lambda *shape: torch.randn(*shape, device=device).to(dtype).requires_grad_()
    if case.lengths_k is None:
        qkv = (leaf(sum(case.lengths_q), 3, heads, dim),)
    else:
        qkv = tuple(leaf(sum(n), heads, dim) for n in (case.lengths_q, lengths_k, lengths_k))
    key_bias = None
    if case.key_bias:
        key_bias = torch.randn(sum(lengths_k), device=device)
        key_bias[::3] = float("-inf")
        key_bias[: lengths_k[0]] = float("-inf")  # a sequence whose keys are all hidden
    lengths = (case.lengths_q,) if case.lengths_k is None else (case.lengths_q, lengths_k)
    return Inputs(
        qkv,
        None if case.relative is None else leaf(heads, 2 * case.relative + 1),
        torch.rand(heads, device=device) if case.alibi else None,
        key_bias,
        tuple(offsets_of(n).to(device) for n in lengths),
        tuple(max(n) for n in lengths),
    )


def with_extreme_scores(inputs: Inputs, magnitude: float) -> Inputs:
    """The same with scores of about ``magnitude``, often equal and exact in float32 at a head_dim of 16. The bias of a
    hidden key is the dtype's lowest number instead of -inf."""
    packed_qkv = len(inputs.qkv) == 1
    q, k, v = (x.detach() for x in (inputs.qkv[0].unbind(1) if packed_qkv else inputs.qkv))
    step = max(1.0, 4 * abs(magnitude) * torch.finfo(torch.float32).eps)
    draw = lambda like: torch.randint(-3, 4, like.shape, device=like.device).to(like.dtype)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], q[..., 1] = 4 * magnitude, 4 * step  # times 1 / 4, the softmax scale
    k[..., 0], k[..., 1] = 1, draw(k[..., 1])
    qkv = (torch.stack([q, k, v], dim=1),) if packed_qkv else (q, k, v)
    relative, slopes, key_bias = inputs.relative, inputs.slopes, inputs.key_bias
    lowest = torch.finfo(q.dtype).min
    return inputs._replace(
        qkv=tuple(x.requires_grad_() for x in qkv),
        relative=None if relative is None else (step * draw(relative)).requires_grad_(),
        slopes=None if slopes is None else torch.full_like(slopes, step),
        key_bias=None
        if key_bias is None
        else torch.where(key_bias.isinf(), lowest, step * draw(key_bias)),
    )


def run(case: Case, inputs: Inputs, **options):
    """Run the public function on a case."""
    function = attention if case.lengths_k is None else cross_attention
    return function(
        *inputs.qkv, *inputs.cu_seqlens, *inputs.max_seqlens, **inputs.options(case), **options
    )


def rounding_of(lse: Tensor) -> float:
    """The relative error of a backward that uses the stored log-sum-exp: its rounding is a factor of all
    probabilities."""
    finite = lse.detach()[lse.isfinite()]
    return float(finite.abs().amax()) * torch.finfo(lse.dtype).eps / 2 if len(finite) else 0.0


def run_peer(case: Case, inputs: Inputs) -> Tensor:
    q, k, v = inputs.qkv[0].unbind(1) if case.lengths_k is None else inputs.qkv
    return plain_cross(
        q,
        k,
        v,
        case.lengths_q,
        case.lengths_k or case.lengths_q,
        case.window,
        inputs.slopes,
        inputs.relative,
        inputs.key_bias,
    )


def run_reference(case: Case, inputs: Inputs, **options) -> tuple[Tensor, Tensor]:
    q, k, v = inputs.qkv[0].unbind(1) if case.lengths_k is None else inputs.qkv
    repeat = 2 if case.lengths_k is None else 1
    return reference(
        q,
        k,
        v,
        *inputs.cu_seqlens * repeat,
        *inputs.max_seqlens * repeat,
        **inputs.options(case),
        **options,
    )
