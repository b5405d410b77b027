"""Softmax cross-entropy over the labelled rows of a logits matrix."""

import math
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
from fastenc.reference import masked_cross_entropy as reference

declare("masked_cross_entropy", "cpp", "cuda")


def masked_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    impl: str = "auto",
) -> Tensor:
    """Cross-entropy of the rows whose label is not ``ignore_index``; the other rows are never read.

        loss_i = lse_i - (1 - e) * x_i[y_i] - e * mean(x_i) + z_loss * lse_i^2,   lse_i = log sum_j exp(x_i[j])

    with e = label_smoothing. The gradient is computed in the forward pass, when the row is in the cache, into another
    buffer; the logits are not changed. If the logits come from a linear layer, :func:`linear_masked_cross_entropy`
    avoids computing those of ignored rows.

    Args:
        logits: (rows, vocabulary), floating point.
        labels: int64 (rows,), in [0, vocabulary) or ``ignore_index``. On CUDA tensors the values are not checked,
            because that would wait for the device: a row with another label gives a NaN loss and gradient, and no
            memory outside the row is read.
        label_smoothing: in [0, 1].
        z_loss: factor of the squared log-normaliser.
        reduction: "mean" over the labelled rows, "sum", or "none" (0 in ignored rows).
        impl: "auto", "cpp", "cuda" or "reference".
    Returns: float32 (float64 for float64 logits); a scalar, or (rows,) for "none". Without any labelled row the loss
        and the gradient are 0 (``F.cross_entropy`` returns nan).
    Raises: ValueError stating rule, received value, remedy.
    Numerics: statistics and loss in fp32 for every dtype. Deterministic: yes. Differentiable: logits.
    Memory: the gradient. On a CPU under Linux, the pages of its ignored rows are never touched.
    Synchronisation: none on CUDA tensors, except in the reference; the divisor of "mean" stays on the device.
    Source: Szegedy et al. 2016, arXiv:1512.00567 (label smoothing); Chowdhery et al. 2022, arXiv:2204.02311 (z-loss).
    """
    check_loss_options("masked_cross_entropy", label_smoothing, z_loss, reduction)
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            "masked_cross_entropy: logits must be floating point of shape (rows, vocabulary), "
            f"got {logits.dtype} of shape {tuple(logits.shape)}: flatten the leading dimensions"
        )
    check_labels("masked_cross_entropy", labels, logits, logits.shape[1], ignore_index)
    if choose("masked_cross_entropy", impl, logits) == "reference":
        return reference.masked_cross_entropy(
            logits,
            labels,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
        )
    options = (ignore_index, label_smoothing, z_loss)
    if torch.is_grad_enabled() and logits.requires_grad:
        return _MaskedCrossEntropy.apply(logits, labels, options, reduction)
    losses, _ = torch.ops.fastenc.masked_cross_entropy_fwd(logits, labels, *options, None, False)
    return reduce_losses(losses, reduction, count_labelled(labels, ignore_index))


def count_labelled(labels: Tensor, ignore_index: int) -> Tensor:
    """Number of labelled rows, at least 1: int64 scalar."""
    return (labels != ignore_index).sum().clamp(min=1)


def reduce_losses(losses: Tensor, reduction: str, count: Tensor) -> Tensor:
    """Reduce losses (rows,). Sums are in float64, so that their order does not change the float32 result."""
    if reduction == "none":
        return losses
    total = losses.sum(dtype=torch.float64)
    return (total / count if reduction == "mean" else total).to(losses.dtype)


def check_loss_options(op: str, label_smoothing: float, z_loss: float, reduction: str) -> None:
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {label_smoothing}")
    if not 0.0 <= z_loss < math.inf:
        raise ValueError(f"{op}: z_loss must be a finite number of at least 0, got {z_loss}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def check_labels(op: str, labels: Tensor, rows: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise ValueError unless labels are int64 (len(rows),), each in [0, vocabulary) or ``ignore_index``.

    The values are checked where ``debug.may_read`` allows it.
    """
    if labels.dtype != torch.int64 or labels.shape != rows.shape[:1]:
        raise ValueError(
            f"{op}: labels must be int64 of shape ({rows.shape[0]},), one class index a row, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    checks.check_device(op, "labels", labels, rows)
    if not debug.may_read(labels):
        return
    outside = ((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"{op}: labels must be in [0, {vocabulary}) or ignore_index {ignore_index}, "
            f"got {int(labels[row])} in row {row}: was another vocabulary's tokenizer used?"
        )


class _MaskedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, options, reduction):
        count = count_labelled(labels, options[0])
        divisor = count if reduction == "mean" else None
        ctx.save_for_backward(logits, labels, divisor)
        ctx.options, ctx.gradient = options, []
        # A compiled graph keeps no state beside its saved tensors, so its backward computes the gradient.
        keeps_gradient = not torch.compiler.is_compiling()
        losses, dlogits = torch.ops.fastenc.masked_cross_entropy_fwd(
            logits, labels, *options, divisor, keeps_gradient
        )
        if keeps_gradient:
            ctx.gradient.append(dlogits)
        return reduce_losses(losses, reduction, count)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        logits, labels, divisor = ctx.saved_tensors
        # The kept gradient is returned without a copy. A second backward computes it again.
        dlogits = (
            ctx.gradient.pop()
            if ctx.gradient
            else torch.ops.fastenc.masked_cross_entropy_fwd(
                logits, labels, *ctx.options, divisor, True
            )[1]
        )
        torch.ops.fastenc.scale_labelled_rows_(
            dlogits, labels, ctx.options[0], dloss.contiguous().flatten()
        )
        return dlogits, None, None, None


def _fake_forward(logits, labels, ignore_index, label_smoothing, z_loss, divisor, wants_gradient):
    losses = logits.new_empty((logits.shape[0],), dtype=torch.float32)
    empty = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return losses, empty if wants_gradient else logits.new_empty((0,))


def _fake_in_place(logits, labels, ignore_index, label_smoothing, z_loss, divisor):
    return logits.new_empty((logits.shape[0],), dtype=torch.float32)


# divisor: int64, one element, on the logits' device; the gradient is divided by it.
define(
    "masked_cross_entropy_fwd(Tensor logits, Tensor labels, int ignore_index, float label_smoothing, float z_loss, "
    "Tensor? divisor, bool wants_gradient) -> (Tensor, Tensor)",
    _fake_forward,
)
# The row stride may be larger than the number of columns; the memory between rows is not changed.
define(
    "masked_cross_entropy_(Tensor(a!) logits, Tensor labels, int ignore_index, float label_smoothing, float z_loss, "
    "Tensor? divisor) -> Tensor",
    _fake_in_place,
)
define(
    "scale_labelled_rows_(Tensor(a!) x, Tensor labels, int ignore_index, Tensor factors) -> ()",
    lambda x, labels, ignore_index, factors: None,
)


def loss_options(draw: Draw) -> dict[str, Any]:
    """Options of the losses' cases."""
    return {
        "label_smoothing": draw.choice(0.0, 0.1),
        "z_loss": draw.choice(0.0, 1e-2),
        "reduction": draw.choice("mean", "sum", "none"),
    }


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    return {
        "logits": draw.normal(size.tokens, size.vocabulary, scale=3.0),
        "labels": draw.labels(size.tokens, size.vocabulary),
        **loss_options(draw),
    }


def _plain(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(widened(logits), labels)


declare_case(masked_cross_entropy, _case_inputs, _plain)
