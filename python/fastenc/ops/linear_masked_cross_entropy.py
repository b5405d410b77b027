"""The output projection and its cross-entropy, over the labelled rows only."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.ops import _checks
from fastenc.ops._dispatch import choose
from fastenc.ops.masked_cross_entropy import check_labels, check_loss_options, reduce_losses
from fastenc.reference import masked_cross_entropy as reference


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
    max_logits_bytes: int = 2**31,
    impl: str = "auto",
) -> Tensor:
    """masked_cross_entropy(hidden @ weight.T + bias, labels), whose logits exist for labelled rows only.

    The labelled rows are selected first; their logits are turned into their gradient in place. Above
    ``max_logits_bytes`` the rows go through in chunks, and the backward forms each chunk's logits again.

    Args:
        hidden: (tokens, hidden_size), floating point.
        weight: (vocabulary, hidden_size), hidden's dtype; may be the tied embedding matrix.
        bias: (vocabulary,), hidden's dtype, or None.
        labels: int64 (tokens,), in [0, vocabulary) or ``ignore_index``.
        label_smoothing, z_loss, reduction: as in :func:`masked_cross_entropy`.
        max_logits_bytes: largest logits buffer, in bytes; at least one row is always taken.
        impl: "auto", "cpp" or "reference".
    Returns: float32 (float64 for float64 input); a scalar, or (tokens,) for "none".
    Raises: ValueError stating rule, received value, remedy.
    Numerics: logits in hidden's dtype, statistics and loss in fp32. Under autocast, hidden, weight and bias are
        cast first. Deterministic: yes. Differentiable: hidden, weight, bias.
    Memory: labelled rows x vocabulary elements, at most max_logits_bytes, kept until the backward.
    """
    op = "linear_masked_cross_entropy"
    check_loss_options(op, label_smoothing, z_loss, reduction)
    if hidden.dim() != 2 or not hidden.is_floating_point():
        raise ValueError(
            f"{op}: hidden must be floating point of shape (tokens, hidden_size), "
            f"got {hidden.dtype} of shape {tuple(hidden.shape)}: flatten the leading dimensions"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"{op}: weight must have shape (vocabulary, {hidden.shape[1]}), got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{op}: bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}"
        )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            _checks.check_device(op, name, value, hidden)
    if max_logits_bytes <= 0:
        raise ValueError(f"{op}: max_logits_bytes must be positive, got {max_logits_bytes}")
    check_labels(op, labels, hidden, weight.shape[0], ignore_index)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.dtype != hidden.dtype:
            raise ValueError(
                f"{op}: {name} must have hidden's dtype {hidden.dtype}, got {value.dtype}: cast one of them"
            )
    options = (label_smoothing, z_loss)
    unsupported = "it does not run inside torch.compile" if torch.compiler.is_compiling() else None
    rows = (labels != ignore_index).nonzero().flatten()
    chosen, targets = hidden.index_select(0, rows), labels.index_select(0, rows)
    if choose(op, impl, hidden, cpp_limit=unsupported) == "reference":
        losses = reference.linear_masked_cross_entropy(
            chosen,
            weight,
            bias,
            targets,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction="none",
        )
    elif torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (hidden, weight, bias)
    ):
        losses = _LinearMaskedCrossEntropy.apply(
            chosen, weight, bias, targets, options, max_logits_bytes
        )
    else:
        losses = torch.cat(
            [
                torch.ops.fastenc.masked_cross_entropy_fwd(
                    F.linear(chosen[part], weight, bias), targets[part], -1, *options, 1.0, False
                )[0]
                for part in _chunks(chosen, weight, max_logits_bytes)
            ]
        )
    if reduction == "none":
        return losses.new_zeros(labels.shape).index_copy(0, rows, losses)
    return reduce_losses(losses, reduction, torch.tensor(max(rows.shape[0], 1)))


def _chunks(chosen: Tensor, weight: Tensor, max_logits_bytes: int) -> list[slice]:
    rows = max(1, max_logits_bytes // max(1, weight.shape[0] * chosen.element_size()))
    return [
        slice(start, min(start + rows, chosen.shape[0]))
        for start in range(0, max(chosen.shape[0], 1), rows)
    ]


def _losses_and_gradient(chosen, weight, bias, targets, options):
    logits = F.linear(chosen, weight, bias)
    losses = torch.ops.fastenc.masked_cross_entropy_(logits, targets, *options, 1.0)
    return losses, logits


class _LinearMaskedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, chosen, weight, bias, targets, options, max_logits_bytes):
        ctx.options, ctx.chunks = options, _chunks(chosen, weight, max_logits_bytes)
        losses, dlogits = [], None
        for part in ctx.chunks:
            part_losses, dlogits = _losses_and_gradient(
                chosen[part], weight, bias, targets[part], options
            )
            losses.append(part_losses)
        ctx.save_for_backward(
            chosen, weight, bias, targets, dlogits if len(ctx.chunks) == 1 else None
        )
        return torch.cat(losses)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dlosses):
        chosen, weight, bias, targets, saved = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dhidden = torch.empty_like(chosen) if needs_hidden else None
        dweight = dbias = None
        for part in ctx.chunks:
            dlogits = saved
            if dlogits is None:
                _, dlogits = _losses_and_gradient(
                    chosen[part], weight, bias, targets[part], ctx.options
                )
            # The incoming gradient scales the narrow side of each product, never the logits.
            factors = dlosses[part].to(dlogits.dtype)
            if needs_hidden:
                torch.mul(dlogits @ weight, factors[:, None], out=dhidden[part])
            if needs_weight:
                scaled = chosen[part] * factors[:, None]
                dweight = (
                    dlogits.T @ scaled if dweight is None else dweight.addmm_(dlogits.T, scaled)
                )
            if needs_bias:
                part_bias = dlogits.T @ factors
                dbias = part_bias if dbias is None else dbias.add_(part_bias)
        return dhidden, dweight, dbias, None, None, None
