"""KL divergence of a student's distribution over the vocabulary from a teacher's, in blocks of rows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import checks
from fastenc.ops.cases import Draw, Size, declare_case, widened
from fastenc.ops.derivatives import once_differentiable, reference_reason
from fastenc.ops.dispatch import autocast_dtype, declare
from fastenc.reference import linear_kl_divergence as reference

declare("linear_kl_divergence")


def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    max_logits_bytes: int = 2**28,
) -> Tensor:
    """The mean of T^2 KL(p || q) over the rows, or over those that a mask selects.

        p = softmax((teacher_hidden teacher_weight^T + teacher_bias) / T)
        q = softmax((hidden weight^T + bias) / T)

    The logits of both models exist for one block of rows at a time. The student's gradient is computed block by block
    in the forward pass; the backward scales it. Inside torch.compile and function transforms the plain formula is used,
    on all rows at once.

    Args:
        hidden: (rows, width), floating point, the student's hidden states.
        weight: (vocabulary, width), bias: (vocabulary,) or None; hidden's dtype.
        teacher_hidden, teacher_weight, teacher_bias: the teacher's; their width may differ from the student's.
        mask: bool (rows,), the rows to take; None takes all.
        temperature: T, above 0. The factor T^2 makes the gradient's size independent of T.
        max_logits_bytes: largest size in bytes of both models' float32 logits of a block. A block has at least one row.
    Returns: float32 scalar (float64 for float64 input); 0 without rows.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: logits in the inputs' dtypes, softmax and loss in fp32. Under autocast, all inputs are cast first.
        Deterministic: yes. Differentiable: hidden, weight, bias (not the teacher).
    Source: Hinton et al. 2015, arXiv:1503.02531.
    """
    op = "linear_kl_divergence"
    if not temperature > 0:
        raise ValueError(f"{op}: temperature must be above 0, got {temperature}")
    if max_logits_bytes <= 0:
        raise ValueError(f"{op}: max_logits_bytes must be positive, got {max_logits_bytes}")
    _check_model(op, "", hidden, weight, bias)
    _check_model(op, "teacher_", teacher_hidden, teacher_weight, teacher_bias)
    checks.check_device(op, "teacher_hidden", teacher_hidden, hidden)
    for what, student, teacher in (
        ("number of rows", hidden, teacher_hidden),
        ("vocabulary size", weight, teacher_weight),
    ):
        if student.shape[0] != teacher.shape[0]:
            raise ValueError(
                f"{op}: student and teacher must have the same {what}, got {student.shape[0]} and {teacher.shape[0]}: "
                "give both the same tokens, of the same tokenizer"
            )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != hidden.shape[:1]):
        raise ValueError(
            f"{op}: mask must be bool of shape ({hidden.shape[0]},), one for each row, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}"
        )
    if mask is not None:
        checks.check_device(op, "mask", mask, hidden)
    tensors: list[Any] = [hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias]
    if (dtype := autocast_dtype(hidden.device.type)) is not None:
        tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
    if torch.compiler.is_compiling() or reference_reason():
        return reference.linear_kl_divergence(*tensors, mask=mask, temperature=temperature)
    return _LinearKLDivergence.apply(*tensors, mask, temperature, max_logits_bytes)


def _check_model(op: str, prefix: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() != 2 or not hidden.is_floating_point():
        raise ValueError(
            f"{op}: {prefix}hidden must be floating point of shape (rows, width), got {hidden.dtype} of shape "
            f"{tuple(hidden.shape)}: select the rows first"
        )
    checks.check_vocabulary_layer(op, hidden, weight, bias, prefix)


class _LinearKLDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        teacher_hidden,
        teacher_weight,
        teacher_bias,
        mask,
        temperature,
        limit,
    ):
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        block = max(1, limit // max(1, 2 * vocabulary * wide.itemsize))
        selected = hidden.new_ones(rows, dtype=torch.bool) if mask is None else mask
        row_weights = selected.to(wide) / selected.sum().clamp(min=1)
        total = hidden.new_zeros((), dtype=torch.float64)
        dhidden = torch.empty_like(hidden) if needs_hidden else None
        dweight = torch.zeros_like(weight) if needs_weight else None
        dbias = torch.zeros_like(bias) if needs_bias else None
        for start in range(0, rows, block):
            taken = slice(start, start + block)
            logits = F.linear(hidden[taken], weight, bias).to(wide)
            teacher_logits = F.linear(teacher_hidden[taken], teacher_weight, teacher_bias).to(wide)
            log_q, log_p = (x.div_(temperature).log_softmax(1) for x in (logits, teacher_logits))
            del logits, teacher_logits
            p = log_p.exp()
            losses = torch.sum(p * log_p.sub_(log_q), dim=1)
            total += torch.sum(losses * row_weights[taken], dtype=torch.float64)
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            # d(T^2 KL)/dlogits = T (q - p)
            factors = temperature * row_weights[taken, None]
            dlogits = log_q.exp_().sub_(p).mul_(factors).to(hidden.dtype)
            if needs_hidden:
                torch.mm(dlogits, weight, out=dhidden[taken])
            if needs_weight:
                torch.addmm(dweight, dlogits.T, hidden[taken], out=dweight)
            if needs_bias:
                dbias += dlogits.sum(0)
        ctx.save_for_backward(dhidden, dweight, dbias)
        return (total * temperature**2).to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        scaled = (
            None if gradient is None else gradient * dloss.to(gradient.dtype)
            for gradient in ctx.saved_tensors
        )
        return *scaled, None, None, None, None, None, None


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    width, vocabulary = draw.choice(size.width, 17, 96), size.vocabulary
    rows = size.tokens // 4  # as many as masked-LM training predicts, or less
    return {
        "hidden": draw.normal(rows, size.width),
        "weight": draw.normal(vocabulary, size.width, scale=size.width**-0.5),
        "bias": draw.choice(draw.normal(vocabulary), None),
        "teacher_hidden": draw.constant(rows, width),
        "teacher_weight": draw.constant(vocabulary, width, scale=width**-0.5),
        "teacher_bias": draw.choice(None, draw.constant(vocabulary)),
        "mask": draw.choice(None, draw.integers(2, rows).bool()),
        "temperature": draw.choice(1.0, 2.0),
    }


def _plain(hidden, weight, bias, teacher_hidden, teacher_weight, **options: Any) -> Tensor:
    logits, targets = (
        widened(x)
        for x in (F.linear(hidden, weight, bias), F.linear(teacher_hidden, teacher_weight))
    )
    log_q, log_p = logits.log_softmax(1), targets.log_softmax(1)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


declare_case(linear_kl_divergence, _case_inputs, _plain, reference=reference.linear_kl_divergence)
