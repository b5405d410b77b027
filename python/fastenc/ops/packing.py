"""Conversion of activations between padded and packed layout, by the indices that a PackedBatch holds."""

import math
from typing import Any

import torch
from torch import Tensor

from fastenc.ops import checks
from fastenc.ops.cases import Draw, Size, declare_case, sequences
from fastenc.ops.dispatch import choose, declare
from fastenc.ops.library import define
from fastenc.packing import PackedBatch
from fastenc.reference import packing as reference

declare("pack", "cpp", "triton")
declare("unpack", "cpp", "triton")


def pack(x: Tensor, batch: PackedBatch, *, impl: str = "auto") -> Tensor:
    """Remove the padding: (batch, length, ...) → (total_tokens, ...).

        y[t] = x.flatten(0, 1)[indices[t]]

    Args:
        x: (batch, length, ...), any dtype, in the batch's padded shape. For a batch packed from lists this is
            (batch, max_seqlen) with right padding.
        batch: the :class:`PackedBatch` of the same sequences, with its tensors on x's device.
        impl: "auto", "cpp", "triton" or "reference", for the gradient, which is the forward of :func:`unpack`. The
            forward is always ``index_select``, which reads and writes each row once.
    Returns: (total_tokens, ...), dtype of x.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: a copy. Deterministic: yes. Differentiable, any number of times: x. Nothing is read back from the device.
    """
    indices, shape = batch.padded_indices()
    if tuple(x.shape[:2]) != shape:
        raise ValueError(
            f"pack: x must have the batch's padded shape {shape} in front, got {tuple(x.shape)}: "
            "pass the padded tensor of the same batch"
        )
    checks.check_device("pack", "the batch's indices", indices, x)
    impl = choose("pack", impl, x)
    rows = x.flatten(0, 1)
    if impl == "reference" or not (torch.is_grad_enabled() and x.requires_grad):
        return rows.index_select(0, indices)
    return _Pack.apply(_matrix(rows), indices).view(len(indices), *x.shape[2:])


def unpack(
    values: Tensor, batch: PackedBatch, padding_value: float = 0.0, *, impl: str = "auto"
) -> Tensor:
    """Put the padding back, in one pass: (total_tokens, ...) → (batch, length, ...).

        y.flatten(0, 1)[indices[t]] = values[t],  padding_value elsewhere

    Args:
        values: (total_tokens, ...), any dtype.
        batch: the :class:`PackedBatch` of the same sequences, with its tensors on the device of values. A batch packed
            from lists gets right padding up to max_seqlen.
        padding_value: the value of all elements of padding rows.
        impl: "auto", "cpp", "triton" or "reference".
    Returns: (batch, length, ...), dtype of values.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: a copy. Deterministic: yes. Differentiable, any number of times: values. Nothing is read back from the
    device.
    """
    if values.dim() < 1 or values.shape[0] != batch.total_tokens:
        raise ValueError(
            f"unpack: values must have one row for each of the batch's {batch.total_tokens} tokens, "
            f"got shape {tuple(values.shape)}: pass the packed output of the same batch"
        )
    indices, shape = batch.padded_indices()
    checks.check_device("unpack", "the batch's indices", indices, values)
    impl = choose("unpack", impl, values)
    rows = shape[0] * shape[1]
    if impl == "reference":
        padded = reference.unpack(values, indices, rows, padding_value)
    elif torch.is_grad_enabled() and values.requires_grad:
        padded = _Unpack.apply(_matrix(values), indices, rows, padding_value)
    else:
        padded = torch.ops.fastenc.unpack(_matrix(values), indices, rows, padding_value)
    return padded.view(*shape, *values.shape[1:])


def _matrix(rows: Tensor) -> Tensor:
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, indices):
        ctx.save_for_backward(indices)
        ctx.rows = rows.shape[0]
        return rows.index_select(0, indices)

    @staticmethod
    def backward(ctx, dy):
        (indices,) = ctx.saved_tensors
        return _Unpack.apply(dy, indices, ctx.rows, 0.0), None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, indices, rows, padding_value):
        ctx.save_for_backward(indices)
        return torch.ops.fastenc.unpack(values, indices, rows, padding_value)

    @staticmethod
    def backward(ctx, dy):
        (indices,) = ctx.saved_tensors
        return _Pack.apply(dy, indices), None, None, None


define(
    "unpack(Tensor values, Tensor indices, SymInt rows, float padding_value) -> Tensor",
    lambda values, indices, rows, padding_value: values.new_empty((rows, values.shape[1])),
    triton="packing.unpack",
)


def _pack_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    batch = draw.batch(size)
    more = draw.choice((size.width,), (), (3, 5))
    return {"x": draw.normal(*batch.padded_indices()[1], *more), "batch": batch}


def _unpack_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    batch = draw.batch(size)
    more = draw.choice((size.width,), (), (3, 5))
    return {
        "values": draw.normal(batch.total_tokens, *more),
        "batch": batch,
        "padding_value": draw.choice(0.0, -1.5),
    }


def _plain_pack(x: Tensor, batch: PackedBatch) -> Tensor:
    lengths = batch.cu_seqlens.diff().tolist()
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])


def _plain_unpack(values: Tensor, batch: PackedBatch, padding_value: float) -> Tensor:
    rows = list(sequences(values, batch.cu_seqlens))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding_value)


declare_case(pack, _pack_inputs, _plain_pack)
declare_case(unpack, _unpack_inputs, _plain_unpack)
