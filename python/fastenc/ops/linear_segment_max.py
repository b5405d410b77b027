"""The largest output of a linear layer over each packed sequence's tokens, without the outputs of all tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import checks, dispatch
from fastenc.ops.cases import Draw, Size, declare_case, sequences, widened
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.library import define
from fastenc.packing import check_cu_seqlens
from fastenc.reference import linear_segment_max as reference

dispatch.declare("linear_segment_max", "cpp", "triton")


def linear_segment_max(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The maxima of hidden @ weight.T + bias over the tokens of each sequence, and the tokens that have them.

        values[s, v] = max_t hidden[t] . weight[v] + bias[v],   t over sequence s

    The product is computed in tiles, of which only the maxima are kept: memory grows with the sequences and not with
    their tokens. The gradient reads the rows of ``argmax`` alone.

    Args:
        hidden: (total_tokens, width), floating point.
        weight: (vocabulary, width), hidden's dtype; may be the tied embedding matrix.
        bias: (vocabulary,), hidden's dtype, or None.
        cu_seqlens: int32 (batch+1,), offsets of the sequences from 0 to total_tokens.
        impl: "auto", "cpp", "triton" or "reference".
    Returns: (values (batch, vocabulary), hidden's dtype; argmax int32 (batch, vocabulary), rows of hidden). The first
        token with the maximum counts. An empty sequence has the values 0 and the argmax -1.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: sums in fp32, compared before they are rounded to hidden's dtype. The maximum of values with a NaN is NaN.
        Under autocast, all three are cast first. Deterministic: yes.
    Differentiable: hidden, weight, bias; by values.
    Source: Formal et al. 2021, arXiv:2109.10086, whose documents are such maxima.
    """
    op = "linear_segment_max"
    hidden, weight, bias = checked(op, hidden, weight, bias, cu_seqlens)
    limit = None if hidden.shape[1] else "the rows of hidden are empty"
    if dispatch.choose(op, impl, hidden, cpp_limit=limit, triton_limit=limit) == "reference":
        return reference.linear_segment_max(hidden, weight, bias, cu_seqlens)
    given = (hidden, weight) if bias is None else (hidden, weight, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return _LinearSegmentMax.apply(hidden, weight, bias, cu_seqlens)
    return torch.ops.fastenc.linear_segment_max_fwd(hidden, weight, bias, cu_seqlens)


def checked(
    op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(hidden, weight, bias) after the checks, in one dtype: under autocast they are cast."""
    if hidden.dim() != 2 or not hidden.is_floating_point():
        raise ValueError(
            f"{op}: hidden must be floating point of shape (total_tokens, width), "
            f"got {hidden.dtype} of shape {tuple(hidden.shape)}: pack the tokens first"
        )
    checks.check_vocabulary_layer(op, hidden, weight, bias)
    checks.check_device(op, "cu_seqlens", cu_seqlens, hidden)
    check_cu_seqlens(cu_seqlens, hidden.shape[0], hidden.shape[0])
    if (dtype := dispatch.autocast_dtype(hidden.device.type)) is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return hidden, weight, bias


class _LinearSegmentMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, cu_seqlens):
        values, argmax = torch.ops.fastenc.linear_segment_max_fwd(hidden, weight, bias, cu_seqlens)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            hidden if needs_weight else None, weight if needs_hidden else None, argmax
        )
        ctx.tokens = hidden.shape[0]
        ctx.mark_non_differentiable(argmax)
        return values, argmax

    @staticmethod
    @once_differentiable
    def backward(ctx, dvalues, _):
        hidden, weight, argmax = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dhidden = dweight = dbias = None
        if needs_hidden:
            dhidden = torch.ops.fastenc.linear_segment_max_dhidden(
                dvalues, argmax, weight, ctx.tokens
            )
        if needs_weight:
            dweight = torch.ops.fastenc.linear_segment_max_dweight(dvalues, argmax, hidden)
        if needs_bias:
            taken = torch.where(argmax >= 0, dvalues, 0)
            dbias = taken.sum(0, dtype=torch.float32).to(dvalues.dtype)
        return dhidden, dweight, dbias, None


def _fake_forward(hidden, weight, bias, cu_seqlens):
    values = hidden.new_empty((cu_seqlens.shape[0] - 1, weight.shape[0]))
    return values, torch.empty_like(values, dtype=torch.int32)


define(
    "linear_segment_max_fwd(Tensor hidden, Tensor weight, Tensor? bias, Tensor cu_seqlens) -> (Tensor, Tensor)",
    _fake_forward,
    triton="linear_segment_max.linear_segment_max_forward",
)
define(
    "linear_segment_max_dhidden(Tensor dvalues, Tensor argmax, Tensor weight, SymInt tokens) -> Tensor",
    lambda dvalues, argmax, weight, tokens: dvalues.new_empty((tokens, weight.shape[1])),
    triton="linear_segment_max.linear_segment_max_dhidden",
)
define(
    "linear_segment_max_dweight(Tensor dvalues, Tensor argmax, Tensor hidden) -> Tensor",
    lambda dvalues, argmax, hidden: dvalues.new_empty((dvalues.shape[1], hidden.shape[1])),
    triton="linear_segment_max.linear_segment_max_dweight",
)


def case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    return {
        "hidden": draw.normal(size.tokens, size.width),
        "weight": draw.normal(size.vocabulary, size.width, scale=size.width**-0.5),
        "bias": draw.choice(draw.normal(size.vocabulary), None),
        "cu_seqlens": draw.offsets(size.lengths),
    }


def _plain(hidden: Tensor, weight: Tensor, bias: Tensor, cu_seqlens: Tensor) -> Tensor:
    logits = F.linear(widened(hidden), widened(weight), widened(bias))
    zeros = logits.new_zeros(logits.shape[1])
    parts = sequences(logits, cu_seqlens)
    return torch.stack([p.max(0).values if len(p) else zeros for p in parts]).to(hidden.dtype)


declare_case(linear_segment_max, case_inputs, _plain, result=lambda result: result[0])
