"""Sums of log(1 + ReLU) of a linear layer's outputs over each sequence, without the outputs of all tokens."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import dispatch
from fastenc.ops.cases import Draw, Size, declare_case, sequences, widened
from fastenc.ops.derivatives import once_differentiable, reference_reason
from fastenc.ops.gemm import gemm
from fastenc.ops.library import define
from fastenc.ops.linear_segment_max import case_inputs, checked
from fastenc.ops.segment_pool import segment_pool
from fastenc.reference import linear_segment_log_sum as reference

dispatch.declare("linear_segment_log_sum", "cpp")
ACTIVATIONS = ("relu", "log1p_relu")


def linear_segment_log_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    activation: str = "relu",
    max_logits_bytes: int = 2**25,
    impl: str = "auto",
) -> Tensor:
    """Sums of log(1 + ReLU(hidden @ weight.T + bias)) over the tokens of each sequence.

        values[s, v] = sum_t log(1 + a(hidden[t] . weight[v] + bias[v])),   t over sequence s
        a(u) = max(0, u), or with "log1p_relu" log(1 + max(0, u))

    On a CPU the outputs are computed in tiles, of which only the sums are kept. Elsewhere, and in the backward, which
    computes them again, they exist for one block of the vocabulary at a time. Inside torch.compile and function
    transforms the plain formula is used, on the whole vocabulary at once.

    Args:
        hidden: (total_tokens, width), floating point.
        weight: (vocabulary, width), hidden's dtype; may be the tied embedding matrix.
        bias: (vocabulary,), hidden's dtype, or None.
        cu_seqlens: int32 (batch+1,), offsets of the sequences from 0 to total_tokens.
        activation: a: "relu" or "log1p_relu", the names of sentence-transformers' SpladePooling.
        max_logits_bytes: largest size in bytes of the float32 outputs of a block. A block has at least one entry.
        impl: "auto", "cpp" or "reference".
    Returns: (batch, vocabulary), hidden's dtype; 0 for an empty sequence.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: logarithms and sums in fp32; in C++ the outputs too, else in hidden's dtype. Under autocast, all three are
        cast first. Deterministic: yes. Differentiable: hidden, weight, bias.
    Source: Formal et al. 2021, arXiv:2107.05720.
    """
    op = "linear_segment_log_sum"
    if max_logits_bytes <= 0:
        raise ValueError(f"{op}: max_logits_bytes must be positive, got {max_logits_bytes}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {ACTIVATIONS}, got {activation!r}")
    given = checked(op, hidden, weight, bias, cu_seqlens)
    limit = None if hidden.shape[1] else "the rows of hidden are empty"
    chosen = dispatch.choose(op, impl, given[0], cpp_limit=limit)
    if torch.compiler.is_compiling() or reference_reason():
        return reference.linear_segment_log_sum(*given, cu_seqlens, activation)
    return _LinearSegmentLogSum.apply(
        *given, cu_seqlens, activation == "log1p_relu", max_logits_bytes, chosen == "cpp"
    )


def _blocks(hidden: Tensor, weight: Tensor, limit: int) -> Iterator[slice]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    entries = max(1, limit // max(1, hidden.shape[0] * wide.itemsize))
    for start in range(0, weight.shape[0], entries):
        yield slice(start, start + entries)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice) -> Tensor:
    """A block's outputs, float32 or wider."""
    return widened(gemm(hidden, weight[block].t(), None if bias is None else bias[block]))


def _gradient_of_logits(logits: Tensor, dvalues: Tensor, cu_seqlens: Tensor, twice: bool) -> Tensor:
    """The gradient with respect to the outputs, which it overwrites, given that with respect to their sums.

    d log(1 + relu(u)) / du = [u > 0] / (1 + u); a second logarithm divides by 1 + log(1 + u). A NaN stays.
    """
    active = logits.relu_()
    slope = active.ne(0).to(active.dtype)
    if twice:
        slope /= active.log1p().add_(1)
    slope /= active.add_(1)
    sequence = torch.repeat_interleave(
        torch.arange(len(dvalues), device=logits.device),
        cu_seqlens.diff(),
        output_size=logits.shape[0],
    )
    return slope.mul_(dvalues.index_select(0, sequence))


class _LinearSegmentLogSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, cu_seqlens, twice, limit, cpp):
        ctx.save_for_backward(hidden, weight, bias, cu_seqlens)
        ctx.twice, ctx.limit, ctx.cpp = twice, limit, cpp
        if cpp:
            sums = torch.ops.fastenc.linear_segment_log_sum_fwd(
                hidden, weight, bias, cu_seqlens, twice
            )
            return sums.to(hidden.dtype)
        values = hidden.new_zeros((cu_seqlens.shape[0] - 1, weight.shape[0]))
        lengths = cu_seqlens.diff()[:, None]
        for block in _blocks(hidden, weight, limit):
            logarithms = _logits(hidden, weight, bias, block).relu_().log1p_()
            logarithms = logarithms.log1p_() if twice else logarithms
            values[:, block] = segment_pool(logarithms, cu_seqlens, "mean") * lengths
            del logarithms  # before the next block is computed
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, dvalues):
        hidden, weight, bias, cu_seqlens = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        dhidden = hidden.new_zeros(hidden.shape, dtype=wide) if needs_hidden else None
        dweight = torch.zeros_like(weight) if needs_weight else None
        dbias = torch.zeros_like(bias) if needs_bias else None
        for block in _blocks(hidden, weight, ctx.limit):
            dlogits, given = _logits(hidden, weight, bias, block), dvalues[:, block].to(wide)
            if ctx.cpp:
                torch.ops.fastenc.linear_segment_log_sum_gradient_(
                    dlogits, given, cu_seqlens, ctx.twice
                )
            else:
                dlogits = _gradient_of_logits(dlogits, given, cu_seqlens, ctx.twice)
            narrow = dlogits.to(hidden.dtype)
            if needs_hidden:
                dhidden += gemm(narrow, weight[block])
            if needs_weight:
                dweight[block] = gemm(narrow.t(), hidden)
            if needs_bias:
                dbias[block] = dlogits.sum(0).to(bias.dtype)
            del dlogits, narrow  # before the next block is computed
        dhidden = None if dhidden is None else dhidden.to(hidden.dtype)
        return dhidden, dweight, dbias, None, None, None, None


define(
    "linear_segment_log_sum_fwd(Tensor hidden, Tensor weight, Tensor? bias, Tensor cu_seqlens, bool twice) -> Tensor",
    lambda hidden, weight, bias, cu_seqlens, twice: hidden.new_empty(
        (cu_seqlens.shape[0] - 1, weight.shape[0]), dtype=torch.float32
    ),
)
define(
    "linear_segment_log_sum_gradient_(Tensor(a!) logits, Tensor dsums, Tensor cu_seqlens, bool twice) -> ()",
    lambda logits, dsums, cu_seqlens, twice: None,
)


def _case(size: Size, draw: Draw) -> dict[str, Any]:
    return {**case_inputs(size, draw), "activation": draw.choice(*ACTIVATIONS)}


def _plain(
    hidden: Tensor, weight: Tensor, bias: Tensor, cu_seqlens: Tensor, activation: str
) -> Tensor:
    logarithms = widened(F.linear(hidden, weight, bias)).relu().log1p()
    logarithms = logarithms.log1p() if activation == "log1p_relu" else logarithms
    return torch.stack([part.sum(0) for part in sequences(logarithms, cu_seqlens)]).to(hidden.dtype)


declare_case(linear_segment_log_sum, _case, _plain, reference=reference.linear_segment_log_sum)
