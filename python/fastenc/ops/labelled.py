"""Gathers the rows that have a label, and scatters their losses back, without waiting for a GPU."""

import torch
from torch import Tensor

from fastenc._base import debug
from fastenc.reference.masked_cross_entropy import IGNORED

__all__ = ["IGNORED", "existing_rows", "find_labelled", "select_labelled", "spread"]


def find_labelled(
    labels: Tensor, *, max_labels: int | None = None, ignore_index: int = IGNORED
) -> tuple[Tensor, Tensor | None]:
    """The rows that have a label.

    Args:
        labels: int64 (tokens,).
        max_labels: the number of rows to return, at least the number of labelled rows. None: on a CPU exactly the
            labelled rows; on a GPU, where counting them would wait for the device, and in torch.compile all rows.
    Returns: (the rows' labels, their indices in ``labels``). The indices are None if all rows are returned. Rows beyond
        the labelled ones have the label ``ignore_index`` and the index ``tokens``.
    Raises: ValueError if ``max_labels`` is negative or, on a CPU, too small. On a GPU this is not checked: if it is too
        small, every row gets a label outside of any vocabulary, which gives a NaN loss.
    """
    on_host = labels.device.type == "cpu" and not torch.compiler.is_compiling()
    is_counted = debug.may_read(labels)
    tokens = labels.shape[0]
    labelled = labels != ignore_index
    if max_labels is None:
        if not on_host:
            return labels, None
        indices = labelled.nonzero().flatten()
        return labels.index_select(0, indices), indices
    count = labelled.sum()
    if max_labels < 0 or (is_counted and int(count) > max_labels):
        counted = f" for {int(count)} of them" if is_counted else ""
        raise ValueError(
            f"max_labels must be at least the number of labelled rows, got {max_labels}{counted}: "
            "count them where the labels are made"
        )
    if max_labels >= tokens:
        return labels, None
    indices = torch.nonzero_static(labelled, size=max_labels, fill_value=tokens).flatten()
    chosen = labels.index_select(0, existing_rows(indices, tokens))
    chosen = torch.where(indices < tokens, chosen, ignore_index)
    return torch.where(count > max_labels, min(ignore_index, 0) - 1, chosen), indices


def existing_rows(indices: Tensor, tokens: int) -> Tensor:
    """The indices of :func:`find_labelled`, with the last row's in place of ``tokens``, the index of no row.

    The label of such a row is ``ignore_index``, so its loss is 0.
    """
    return indices.clamp(max=tokens - 1)


def select_labelled(
    hidden: Tensor, labels: Tensor, *, max_labels: int | None = None, ignore_index: int = IGNORED
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The labelled rows of ``hidden`` (tokens, hidden_size), for a head that computes these only; differentiable.

    Arguments and errors are those of :func:`find_labelled`.
    Returns: (rows, their labels, their indices in ``labels`` or None).
    """
    chosen, indices = find_labelled(labels, max_labels=max_labels, ignore_index=ignore_index)
    if indices is None:
        return hidden, chosen, None
    return hidden.index_select(0, existing_rows(indices, labels.shape[0])), chosen, indices


def spread(losses: Tensor, indices: Tensor, tokens: int) -> Tensor:
    """(tokens,): each loss at its index, 0 elsewhere. Losses with the index ``tokens`` are dropped."""
    return losses.new_zeros(tokens + 1).index_copy(0, indices, losses)[:tokens]
