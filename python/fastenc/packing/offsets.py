"""Checks of offsets and of global tokens."""

import weakref
from collections.abc import Callable
from operator import sub

import torch
from torch import Tensor

from fastenc._base import debug

# The last offsets that passed the check: a weak reference to them, their version, and the total_tokens and max_seqlen
# of that check. The tuple is replaced as a whole, because several threads may check.
_last_checked: tuple[Callable[[], Tensor | None], int | None, int, int] = (lambda: None, 0, 0, 0)


def check_cu_seqlens(
    cu_seqlens: Tensor, total_tokens: int, max_seqlen: int, suffix: str = ""
) -> None:
    """Check offsets: int32, one-dimensional, from 0 to total_tokens, non-decreasing, no sequence above max_seqlen.

    The values are checked on CPU tensors only, because on a GPU the check would wait for the device. Every layer calls
    this, but the values of a batch are read once: a second call with the same tensor returns early. The C++ kernels
    check again that no offset leads outside the buffers. With FASTENC_DEBUG=1 every call reads them, on every device.

    Args: suffix: appended to the names in messages; "_q" makes cu_seqlens_q and max_seqlen_q.
    Raises: ValueError stating rule, received value, remedy.
    """
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"cu_seqlens{suffix} must be int32 of shape (batch+1,), got {cu_seqlens.dtype} of shape "
            f"{tuple(cu_seqlens.shape)}: build it with fastenc.packing.pack"
        )
    if max_seqlen < 0:
        raise ValueError(
            f"max_seqlen{suffix} must be at least 0, got {max_seqlen}: pass the batch's max_seqlen"
        )
    if not debug.may_read(cu_seqlens):
        return
    global _last_checked
    version = None if cu_seqlens.is_inference() else cu_seqlens._version
    checked, *checked_with, longest = _last_checked
    same = checked() is cu_seqlens and checked_with == [version, total_tokens]
    if same and longest <= max_seqlen and not debug.ENABLED:
        return
    _check_offsets(cu_seqlens.tolist(), total_tokens, max_seqlen, suffix)
    _last_checked = weakref.ref(cu_seqlens), version, total_tokens, max_seqlen


def check_global_tokens(global_tokens: Tensor, tokens: int, op: str = "") -> None:
    """Check global tokens: int64, one-dimensional, ascending indices of tokens. Values are checked on a CPU only.

    Args: op: begins the message.
    Raises: ValueError stating rule, received value, remedy.
    """
    if global_tokens.dtype != torch.int64 or global_tokens.dim() != 1:
        raise ValueError(
            f"{op}global_tokens must be int64 of shape (G,), indices in the packed batch, got {global_tokens.dtype} of "
            f"shape {tuple(global_tokens.shape)}: fastenc.packing.first_tokens makes such a tensor"
        )
    if not debug.may_read(global_tokens) or not len(global_tokens):
        return
    ascend = bool((global_tokens.diff() > 0).all())
    if not ascend or int(global_tokens[0]) < 0 or int(global_tokens[-1]) >= tokens:
        raise ValueError(
            f"{op}global_tokens must ascend from at least 0 to less than the {tokens} tokens of the batch, got "
            f"{global_tokens.tolist()[:8]}: give each global token once"
        )


def _check_offsets(offsets: list[int], total_tokens: int, max_seqlen: int, suffix: str) -> None:
    if offsets[0] != 0 or offsets[-1] != total_tokens:
        raise ValueError(
            f"cu_seqlens{suffix} must run from 0 to the number of tokens {total_tokens}, "
            f"got {offsets[0]} to {offsets[-1]}: were tokens cut after packing?"
        )
    lengths = list(map(sub, offsets[1:], offsets))
    if not lengths or (min(lengths) >= 0 and max(lengths) <= max_seqlen):
        return
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"cu_seqlens{suffix} must not decrease, got {offsets[i]} then {offsets[i + 1]} at index {i + 1}: "
                "give offsets, not lengths"
            )
        if length > max_seqlen:
            raise ValueError(
                f"max_seqlen{suffix} must be at least the longest sequence, got {max_seqlen} but sequence {i} has "
                f"{length} tokens: pass the batch's max_seqlen"
            )
