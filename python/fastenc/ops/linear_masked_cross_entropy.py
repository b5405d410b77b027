"""The output projection and its cross-entropy, over the labelled rows only."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import checks, dispatch
from fastenc.ops.cases import Draw, Size, declare_case, widened
from fastenc.ops.derivatives import once_differentiable
from fastenc.ops.gemm import gemm
from fastenc.ops.labelled import select_labelled, spread
from fastenc.ops.masked_cross_entropy import (
    check_labels,
    check_loss_options,
    count_labelled,
    loss_options,
    reduce_losses,
)
from fastenc.reference import masked_cross_entropy as reference

dispatch.declare("linear_masked_cross_entropy", "cpp", "cuda")


def linear_masked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    max_labels: int | None = None,
    max_logits_bytes: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """masked_cross_entropy(hidden @ weight.T + bias, labels), with logits for the labelled rows only.

    The labelled rows are selected first. The gradient of their logits overwrites the logits. If the logits are larger
    than ``max_logits_bytes``, the rows are processed in chunks, and the backward computes each chunk's logits again.

    Args:
        hidden: (tokens, hidden_size), floating point.
        weight: (vocabulary, hidden_size), hidden's dtype; may be the tied embedding matrix.
        bias: (vocabulary,), hidden's dtype, or None.
        labels: int64 (tokens,), in [0, vocabulary) or ``ignore_index``. On CUDA tensors another label gives a NaN loss
            and gradient.
        label_smoothing, z_loss, reduction: as in :func:`masked_cross_entropy`.
        max_labels: the number of labelled rows, or an upper bound of it, if the caller knows it on the host. Counting
            them on a GPU would wait for the device. So on CUDA tensors this many rows are multiplied, or all rows
            without it. More labelled rows than this are an error on a CPU, and give NaN losses and gradients on a GPU.
        max_logits_bytes: largest size of the logits in bytes; a chunk has at least one row. None: 2 GiB, or a sixteenth
            of a GPU's memory if that is more.
        impl: "auto", "cpp", "cuda" or "reference".
    Returns: float32 (float64 for float64 input); a scalar, or (tokens,) for "none".
    Raises: ValueError stating rule, received value, remedy.
    Numerics: logits in hidden's dtype, statistics and loss in fp32. Under autocast, hidden, weight and bias are
        cast first. In float16 a logit's gradient underflows below 6e-8, because a loss scale is applied after it was
        stored: prefer bfloat16.
    Deterministic: yes. On a GPU, torch scatters the rows into hidden's gradient with atomic additions unless
        deterministic algorithms are on; each row is added to once.
    Differentiable: hidden, weight, bias.
    Memory: labelled rows x vocabulary elements, at most max_logits_bytes, kept until the backward. On a GPU also a copy
        of weight, unless the vocabulary is a multiple of 64.
    Synchronisation: none on CUDA tensors, except in the reference.
    """
    op = "linear_masked_cross_entropy"
    check_loss_options(op, label_smoothing, z_loss, reduction)
    if hidden.dim() != 2 or not hidden.is_floating_point():
        raise ValueError(
            f"{op}: hidden must be floating point of shape (tokens, hidden_size), "
            f"got {hidden.dtype} of shape {tuple(hidden.shape)}: flatten the leading dimensions"
        )
    checks.check_vocabulary_layer(op, hidden, weight, bias)
    if max_logits_bytes is None:
        max_logits_bytes = _default_logits_bytes(hidden.device)
    if max_logits_bytes <= 0:
        raise ValueError(f"{op}: max_logits_bytes must be positive, got {max_logits_bytes}")
    check_labels(op, labels, hidden, weight.shape[0], ignore_index)
    device = hidden.device.type
    if (dtype := dispatch.autocast_dtype(device)) is not None:
        hidden = hidden.to(dtype)
    chosen, targets, indices = select_labelled(
        hidden, labels, max_labels=max_labels, ignore_index=ignore_index
    )
    options = (ignore_index, label_smoothing, z_loss)
    if dispatch.choose(op, impl, hidden) == "reference":
        kept = (targets != ignore_index).nonzero().flatten()
        losses = reference.linear_masked_cross_entropy(
            chosen.index_select(0, kept),
            *_in_dtype(hidden.dtype, weight, bias),
            targets.index_select(0, kept),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction="none",
        )
        losses = losses.new_zeros(targets.shape).index_copy(0, kept, losses)
    elif torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (hidden, weight, bias)
    ):
        losses = _LinearMaskedCrossEntropy.apply(
            chosen, weight, bias, targets, options, max_logits_bytes
        )
    else:
        padded = _padded(*_in_dtype(hidden.dtype, weight, bias))
        vocabulary = weight.shape[0]
        losses = torch.cat(
            [
                torch.ops.fastenc.masked_cross_entropy_fwd(
                    _logits(chosen[chunk], padded)[:, :vocabulary],
                    targets[chunk],
                    *options,
                    None,
                    False,
                )[0]
                for chunk in _chunks(chosen, weight, max_logits_bytes)
            ]
        )
    if reduction == "none":
        return losses if indices is None else spread(losses, indices, labels.shape[0])
    return reduce_losses(losses, reduction, count_labelled(labels, ignore_index))


def _default_logits_bytes(device: torch.device) -> int:
    """The default of ``max_logits_bytes``: large, because a second chunk costs another product in the backward."""
    if device.type != "cuda":
        return 2**31
    return max(2**31, torch.cuda.get_device_properties(device).total_memory // 16)


# A GPU's matrix products are faster if rows, and the sizes of all dimensions, are aligned. With 30,522 columns cuBLAS
# takes kernels of an older architecture for the backward, three times as slow on an H200.
COLUMN_MULTIPLE = {"cuda": 64}

# There the bias's gradient is a column of the weight's, and needs no pass over the logits' gradient of its own. This
# many columns are appended to the hidden states, so that their rows stay aligned too.
BIAS_COLUMNS = {"cuda": 8}


def _in_dtype(
    dtype: torch.dtype, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias cast for autocast."""
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _padded(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias padded with zeros to the device's multiple of vocabulary entries, or as they are if it fits."""
    missing = -weight.shape[0] % COLUMN_MULTIPLE.get(weight.device.type, 1)
    if not missing:
        return weight, bias
    return F.pad(weight, (0, 0, 0, missing)), None if bias is None else F.pad(bias, (0, missing))


def _chunks(chosen: Tensor, weight: Tensor, max_logits_bytes: int) -> list[slice]:
    rows = max(1, max_logits_bytes // max(1, weight.shape[0] * chosen.element_size()))
    if chosen.shape[0] <= rows:
        return [slice(None)]
    return [slice(start, start + rows) for start in range(0, chosen.shape[0], rows)]


def _logits(chosen: Tensor, padded: tuple[Tensor, Tensor | None]) -> Tensor:
    """(rows, padded vocabulary). The columns of the padding are 0."""
    return gemm(chosen, padded[0].t(), padded[1])


class _LinearMaskedCrossEntropy(torch.autograd.Function):
    """Weight and bias are cast to chosen's dtype (autocast). Gradients have the dtypes given."""

    @staticmethod
    def forward(ctx, chosen, weight, bias, targets, options, max_logits_bytes):
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.options, ctx.vocabulary = options, weight.shape[0]
        ctx.chunks = _chunks(chosen, weight, max_logits_bytes)
        padded, losses, dlogits = _padded(*_in_dtype(chosen.dtype, weight, bias)), [], None
        for chunk in ctx.chunks:
            del dlogits  # frees its memory before the next chunk's is allocated
            dlogits = _logits(chosen[chunk], padded)
            losses.append(_to_gradient(dlogits, targets[chunk], ctx))
        ctx.save_for_backward(chosen, *padded, targets, dlogits if len(ctx.chunks) == 1 else None)
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx, dlosses):
        chosen, *padded, targets, saved = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        width, (weight_dtype, bias_dtype) = chosen.shape[1], ctx.dtypes
        appended = BIAS_COLUMNS.get(chosen.device.type, 0) if needs_weight and needs_bias else 0
        # Relative to the largest one, the factors of a mean are 1. In bfloat16 1/N is up to 0.4 % off.
        largest = dlosses.abs().sum() if dlosses.numel() == 0 else dlosses.abs().amax()
        relative = (dlosses / largest.clamp(min=torch.finfo(dlosses.dtype).tiny)).to(chosen.dtype)
        dhidden, dweight, dbias, dlogits = [], None, None, saved
        for chunk in ctx.chunks:
            if saved is None:
                del dlogits
                dlogits = _logits(chosen[chunk], padded)
                _to_gradient(dlogits, targets[chunk], ctx)
            # The incoming gradient scales the factor with hidden_size columns, which is smaller than the logits.
            factors = dlosses[chunk, None]
            if needs_hidden:
                dhidden.append((gemm(dlogits, padded[0]) * factors).to(chosen.dtype))
            if needs_weight:
                scaled = chosen.new_zeros(factors.shape[0], width + appended)
                torch.mul(chosen[chunk], factors, out=scaled[:, :width])
                if appended:
                    scaled[:, width] = relative[chunk]
                dweight = gemm(dlogits.T, scaled, added=dweight, dtype=weight_dtype)
            if needs_bias and not appended:
                sums = (dlogits.T @ relative[chunk]).to(dlosses.dtype)
                dbias = sums if dbias is None else dbias.add_(sums)
        if needs_weight:
            dweight = dweight[: ctx.vocabulary]
        if appended:
            dweight, dbias = dweight[:, :width], dweight[:, width].to(dlosses.dtype)
        elif needs_bias:
            dbias = dbias[: ctx.vocabulary]
        return (
            torch.cat(dhidden) if needs_hidden else None,
            dweight.to(weight_dtype) if needs_weight else None,
            (dbias * largest).to(bias_dtype) if needs_bias else None,
            None,
            None,
            None,
        )


def _to_gradient(logits: Tensor, targets: Tensor, ctx) -> Tensor:
    """Overwrites the logits (rows, padded vocabulary) with their gradient; returns the losses."""
    columns = logits[:, : ctx.vocabulary]
    return torch.ops.fastenc.masked_cross_entropy_(columns, targets, *ctx.options, None)


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    return {
        "hidden": draw.normal(size.tokens, size.width),
        "weight": draw.normal(size.vocabulary, size.width, scale=size.width**-0.5),
        "bias": draw.choice(draw.normal(size.vocabulary), None),
        "labels": draw.labels(size.tokens, size.vocabulary),
        **loss_options(draw),
    }


def _plain(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, **options: Any) -> Tensor:
    labelled = labels != -100
    logits = F.linear(hidden[labelled], weight, bias)
    return F.cross_entropy(widened(logits), labels[labelled])


declare_case(linear_masked_cross_entropy, _case_inputs, _plain)
