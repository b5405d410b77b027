"""The arguments of attention after q, k and v, as the schemas of its forward and backward have them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AttentionCall(NamedTuple):
    """What attention computes over q, k and v: the schema's arguments in its order (``fastenc.ops.attention``).

    Fields:
        cu_seqlens_q, cu_seqlens_k: int32 (batch+1,); the keys' are None if they are the queries'.
        rng_state: int64 (2,), seed and offset of dropout's mask, or None without dropout.
        alibi_slopes, relative_bias, key_bias: float32, or None.
        rotary: float32 (positions, rotary_dim), or None.
        bounds, all_blocks, long_blocks: tables made from the offsets once for several calls, or None.
        max_seqlen_q, max_seqlen_k: at least the longest sequence of each.
        scale: factor of the scores.
        window_left, window_right: number of keys that a query sees on each side, -1 without a limit.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    rng_state: Tensor | None
    alibi_slopes: Tensor | None
    relative_bias: Tensor | None
    key_bias: Tensor | None
    rotary: Tensor | None
    bounds: Tensor | None
    all_blocks: Tensor | None
    long_blocks: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    scale: float
    window_left: int
    window_right: int

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The first fields, which are tensors or None."""
        return self[:TENSORS]

    def without_tensors(self) -> "AttentionCall":
        """The numbers alone, which autograd keeps beside the saved tensors."""
        return self.with_tensors((None,) * TENSORS)

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> "AttentionCall":
        return AttentionCall(*tensors, *self[TENSORS:])  # type: ignore[arg-type]


TENSORS = AttentionCall._fields.index("max_seqlen_q")


def self_attention_call(
    cu_seqlens: Tensor, max_seqlen: int, *, scale: float, dropout_p: float = 0.0, **others
) -> AttentionCall:
    """A call over packed sequences. ``others``: fields that differ from None, or for the window from -1."""
    fields: dict = dict.fromkeys(AttentionCall._fields) | {
        "cu_seqlens_q": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "dropout_p": dropout_p,
        "scale": scale,
        "window_left": -1,
        "window_right": -1,
    }
    return AttentionCall(**(fields | others))


def later_state(rng_state: Tensor, number: int) -> Tensor:
    """The state of a mask whose offset is greater by ``number``; nothing is read back from the device."""
    return torch.cat((rng_state[:1], rng_state[1:] + number)) if number else rng_state
