"""The attention kernel as a back-end of transformers: ``attn_implementation="fastenc"``."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastenc._base.extras import require
from fastenc.ops import cross_attention

NAME = "fastenc"


class _Sequences(NamedTuple):
    """The sequences of a padded batch: of each row, the tokens from its first to its last real one.

    Padding between them stays, because a window counts it. The bias hides it.

    Fields:
        indices: int64 (total_tokens,), indices in the flattened batch; None if all tokens are real.
        cu_seqlens, max_seqlen: as in :func:`fastenc.ops.attention`.
        key_bias: float32 (total_tokens,), -inf for padding between real tokens and 0 for these; None without any.
    """

    indices: Tensor | None
    cu_seqlens: Tensor
    max_seqlen: int
    key_bias: Tensor | None = None


def register_attention() -> None:
    """Register the attention kernel with transformers as ``attn_implementation="fastenc"``.

    Every bidirectional model of transformers that supports attention back-ends can then use it. It computes attention
    of real tokens only::

        fastenc.register_attention()
        model = AutoModel.from_pretrained(name, attn_implementation="fastenc")

    Batches may be padded, or flattened to one row with ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and
    ``max_length_k``, as ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` returns them. For supported
    architectures use :func:`fastenc.patch`, which accelerates the whole encoder.

    A forward raises ValueError for causal attention, a bias for each pair of tokens, soft-capped scores, attention
    sinks, a cache, and masks that are not padding masks.
    """
    transformers = require("transformers", extra="transformers")
    transformers.AttentionInterface.register(NAME, attention_forward)
    transformers.AttentionMaskInterface.register(NAME, padding_mask)


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *offsets: Any,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> Tensor | None:
    """The mask that a model passes to each layer: bool (batch, length), or None without padding.

    It is a new object in every forward, because the layers of one forward keep their result in it.

    Raises: ValueError if the model combines the padding mask with another one.
    """
    if use_vmap:
        raise ValueError(
            'attn_implementation="fastenc" takes a padding mask only, got a model that adds a mask of its own: load it '
            'with attn_implementation="sdpa"'
        )
    return None if attention_mask is None else attention_mask.view_as(attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer.

    Args:
        query: (batch, num_heads, length, head_dim).
        key, value: (batch, num_key_value_heads, length, head_dim).
        attention_mask: the result of :func:`padding_mask`.
        sliding_window: a token sees the positions up to sliding_window - 1 away on each side.
    Returns: (batch, length, num_heads, head_dim), 0 for padding tokens; and None instead of the probabilities.
    Raises: ValueError for a call that the kernel does not support.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _check(bool(causal), attention_mask, query, key, options)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    batch, length = q.shape[:2]
    if cu_seq_lens_q is not None:
        if cu_seq_lens_k is not None and not torch.equal(cu_seq_lens_q, cu_seq_lens_k):
            raise ValueError(
                'attn_implementation="fastenc" computes self-attention, so cu_seq_lens_q and cu_seq_lens_k must be '
                'equal, got different ones: take "sdpa" or "eager"'
            )
        longest = length * batch if max_length_q is None else int(max_length_q)
        sequences = _Sequences(None, cu_seq_lens_q.to(torch.int32), longest)
    else:
        sequences = _sequences(attention_mask, batch, length, q.device)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    if sequences.indices is not None:
        q, k, v = (x[sequences.indices] for x in (q, k, v))
    window = -1 if sliding_window is None else sliding_window - 1
    out = cross_attention(
        q,
        k,
        v,
        sequences.cu_seqlens,
        sequences.cu_seqlens,
        sequences.max_seqlen,
        sequences.max_seqlen,
        dropout_p=dropout,
        softmax_scale=scaling,
        window_size=(window, window),
        key_bias=sequences.key_bias,
    )
    if sequences.key_bias is not None:
        out = out.masked_fill(sequences.key_bias.isinf()[:, None, None], 0)
    if sequences.indices is not None:
        padded = out.new_zeros(batch * length, *out.shape[1:])
        out = padded.index_copy(0, sequences.indices, out)
    return out.view(batch, length, *out.shape[1:]), None


def _check(
    causal: bool, mask: Tensor | None, query: Tensor, key: Tensor, options: dict[str, Any]
) -> None:
    reason = None
    # The mask first: layers that make one of four dimensions do not say that they are bidirectional.
    if mask is not None and mask.dim() != 2:
        reason = f"takes masks (batch, length), got shape {tuple(mask.shape)}"
    elif causal:
        reason = "is bidirectional, and the layer is causal"
    elif query.shape[2] != key.shape[2]:
        reason = f"is self-attention, got {query.shape[2]} queries and {key.shape[2]} keys"
    for name in ("softcap", "s_aux", "position_bias", "cache"):
        if reason is None and options.get(name) is not None:
            reason = f"has no {name}"
    if reason is not None:
        raise ValueError(f'attn_implementation="fastenc" {reason}: take "sdpa" or "eager"')


def _sequences(mask: Tensor | None, batch: int, length: int, device: torch.device) -> _Sequences:
    if mask is None:
        offsets = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
        return _Sequences(None, offsets, length)
    # Every layer of a forward gets the same mask. Counting waits for an accelerator, so the mask keeps the result.
    sequences = getattr(mask, "_fastenc_sequences", None)
    if sequences is None:
        real = mask.bool()
        before, count = real.cumsum(1), real.sum(1, keepdim=True)
        kept = real | ((before > 0) & (before < count))
        lengths = kept.sum(1, dtype=torch.int32)
        offsets = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        gaps = (kept & ~real).sum()
        total, longest, hidden = torch.stack([offsets[-1], lengths.max(), gaps]).tolist()
        indices = kept.flatten().nonzero_static(size=total).flatten()
        key_bias = None
        if hidden:
            is_hidden = ~real.flatten()[indices]
            key_bias = torch.zeros(total, device=device).masked_fill(is_hidden, -torch.inf)
        sequences = _Sequences(indices, offsets, longest, key_bias)
        mask._fastenc_sequences = sequences  # type: ignore[attr-defined]
    return sequences
