"""Packed batches: the sequences of a batch concatenated, without padding.

The host packs a batch once, before the embeddings. ``fastenc.ops.unpack`` restores the padded layout if it is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from fastenc._base import debug
from fastenc._base.transfer import send
from fastenc.packing.offsets import check_cu_seqlens, check_global_tokens

BUILD = "build the batch with fastenc.packing.pack or pack_sequences"


@dataclass(frozen=True)
class PackedBatch:
    """A batch of sequences, concatenated without padding.

    Fields (T = total tokens, B = sequences):
        input_ids: (T,) int64.
        cu_seqlens: (B+1,) int32, offsets of the sequences, from 0 to T.
        max_seqlen: length of the longest sequence, a host int.
        position_ids: (T,) int64, position inside the sequence, from 0.
        token_type_ids: (T,) int64, or None for all zeros.
        indices: (T,) int64, ascending, the index of each token in the flattened padded batch, or None.
        padded_shape: (B, length) of that padded batch, or None.
        hidden: (T, hidden_size), the encoder's output for these tokens if it was computed before, or None. The encoder
            then returns it unchanged.
        global_tokens: (G,) int64, ascending, the indices of the tokens that see all tokens of their sequence and are
            seen by all, for encoders with global attention (Longformer); other encoders do not read it. None: the
            model's head decides; empty: no token.
    Raises: ValueError naming the field, the value and the rule. The values of offsets and indices are checked on CPU
        tensors only, because on an accelerator that would wait for the device. FASTENC_DEBUG=1 checks them there too.
    """

    input_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    position_ids: Tensor
    token_type_ids: Tensor | None = None
    indices: Tensor | None = None
    padded_shape: tuple[int, int] | None = None
    hidden: Tensor | None = None
    global_tokens: Tensor | None = None

    def __post_init__(self) -> None:
        tokens = self.input_ids.shape[:1]
        for name in ("input_ids", "position_ids", "token_type_ids", "indices"):
            value = getattr(self, name)
            if value is None and name in ("token_type_ids", "indices"):
                continue
            if value.dtype != torch.int64 or value.dim() != 1 or value.shape != tokens:
                expected = "(total_tokens,)" if name == "input_ids" else str(tuple(tokens))
                raise ValueError(
                    f"{name} must be int64 of shape {expected}, got {value.dtype} of shape "
                    f"{tuple(value.shape)}: {BUILD}"
                )
        if self.hidden is not None and (self.hidden.dim() != 2 or self.hidden.shape[:1] != tokens):
            raise ValueError(
                f"hidden must have one row for each of the {tokens[0]} tokens, got shape {tuple(self.hidden.shape)}: "
                "pass the encoder's packed output for this batch"
            )
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.device != self.input_ids.device:
                raise ValueError(
                    f"{name} must be on the device of input_ids {self.input_ids.device}, got {value.device}: "
                    "move the batch as a whole with its method to()"
                )
        check_cu_seqlens(self.cu_seqlens, self.total_tokens, self.max_seqlen)
        self._check_indices()
        if self.global_tokens is not None:
            check_global_tokens(self.global_tokens, self.total_tokens)

    def _check_indices(self) -> None:
        if (self.indices is None) != (self.padded_shape is None):
            raise ValueError(
                f"indices and padded_shape go together, got {'padded_shape' if self.indices is None else 'indices'} "
                f"only: {BUILD}"
            )
        if self.indices is None or self.padded_shape is None:
            return
        rows, length = self.padded_shape
        if rows != self.num_sequences or length < 0:
            raise ValueError(
                f"padded_shape must be ({self.num_sequences}, length), a row per sequence, got {self.padded_shape}: "
                f"{BUILD}"
            )
        if not debug.may_read(self.indices):
            return
        ascends = bool((self.indices.diff() > 0).all())
        ends = torch.arange(rows + 1, device=self.indices.device) * length
        if not ascends or not torch.equal(
            torch.searchsorted(self.indices, ends, out_int32=True), self.cu_seqlens
        ):
            raise ValueError(
                f"indices must ascend, and a sequence's indices must lie in its row of the padded shape ({rows}, "
                f"{length}), got {self.indices.tolist()[:8]}...: {BUILD}"
            )

    @property
    def total_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    def padded_indices(self) -> tuple[Tensor, tuple[int, int]]:
        """(indices, padded_shape). A batch packed from lists gets right padding up to max_seqlen."""
        if self.indices is not None and self.padded_shape is not None:
            return self.indices, self.padded_shape
        # The index of a token is its packed index plus the padding of all rows before its own.
        starts = torch.arange(self.num_sequences, device=self.cu_seqlens.device) * self.max_seqlen
        padding = torch.repeat_interleave(
            starts - self.cu_seqlens[:-1], self.cu_seqlens.diff(), output_size=self.total_tokens
        )
        indices = torch.arange(self.total_tokens, device=padding.device) + padding
        return indices, (self.num_sequences, self.max_seqlen)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "PackedBatch":
        """The same batch with its tensors on ``device``."""
        moved: dict[str, Any] = {
            name: send(value, device, non_blocking)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def split(self, groups: Sequence[tuple[int, int, int]]) -> list["PackedBatch"]:
        """Split the batch into batches of consecutive sequences. The new batches have no indices.

        If the batch has global tokens on an accelerator, their numbers are read back, which waits for the device.

        Args: groups: (number of sequences, number of tokens, length of the longest sequence) of each new batch.
        """
        batches, sequence, token = [], 0, 0
        bounds = self._global_bounds([tokens for _, tokens, _ in groups])
        for number, (sequences, tokens, longest) in enumerate(groups):
            tokens_of_group = slice(token, token + tokens)
            types, chosen = self.token_type_ids, self.global_tokens
            if chosen is not None:
                chosen = chosen[bounds[number] : bounds[number + 1]] - token
            batches.append(
                PackedBatch(
                    input_ids=self.input_ids[tokens_of_group],
                    cu_seqlens=self.cu_seqlens[sequence : sequence + sequences + 1] - token,
                    max_seqlen=longest,
                    position_ids=self.position_ids[tokens_of_group],
                    token_type_ids=None if types is None else types[tokens_of_group],
                    global_tokens=chosen,
                )
            )
            sequence, token = sequence + sequences, token + tokens
        return batches

    def _global_bounds(self, tokens: Sequence[int]) -> list[int]:
        """The offsets of groups with these numbers of tokens among the global tokens."""
        if self.global_tokens is None:
            return []
        ends = torch.tensor([0, *accumulate(tokens)], device=self.global_tokens.device)
        return torch.searchsorted(self.global_tokens, ends).tolist()


def pack(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    *,
    global_attention_mask: Tensor | None = None,
    total_tokens: int | None = None,
    max_seqlen: int | None = None,
) -> PackedBatch:
    """Remove the padding of a (B, length) batch.

    Args:
        input_ids: (B, length) integer.
        attention_mask: (B, length), non-zero at real tokens; None keeps every token. Padding may be on the left, on
            the right or between tokens. The order of the tokens is kept.
        token_type_ids: (B, length) integer or None.
        global_attention_mask: (B, length), non-zero at the global tokens of encoders with global attention. On a GPU
            their number is read back to the host. None: the batch says nothing about them.
        total_tokens, max_seqlen: the number of real tokens, and the length of the longest sequence. Without them the
            function reads both back to the host. For tensors on a GPU that waits for the device, so pack CPU tensors
            where possible.
    Returns: a :class:`PackedBatch` with indices, on the device of input_ids.
    Raises: ValueError if the shapes differ or input_ids is not two-dimensional.
    """
    if input_ids.dim() != 2:
        raise ValueError(
            f"input_ids must be (batch, length), got shape {tuple(input_ids.shape)}: "
            "add a batch dimension, or use pack_sequences for a list of sequences"
        )
    masks = {"attention_mask": attention_mask, "global_attention_mask": global_attention_mask}
    for name, value in {**masks, "token_type_ids": token_type_ids}.items():
        if value is not None and value.shape != input_ids.shape:
            raise ValueError(
                f"{name} must have the shape of input_ids {tuple(input_ids.shape)}, "
                f"got {tuple(value.shape)}: build both with the same padding"
            )
    batch, length = input_ids.shape
    device = input_ids.device
    if attention_mask is None:
        positions = torch.arange(length, device=device).repeat(batch)
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        indices = torch.arange(batch * length, device=device)
        max_seqlen = length if batch else 0
    else:
        real = attention_mask != 0
        seqlens = real.sum(1, dtype=torch.int32)
        cu_seqlens = torch.nn.functional.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        if batch and (total_tokens is None or max_seqlen is None):
            total_tokens, max_seqlen = torch.stack((cu_seqlens[-1], seqlens.max())).tolist()
        indices = real.flatten().nonzero_static(size=total_tokens or 0).flatten()
        positions = (real.cumsum(1) - 1).flatten()[indices]
    return PackedBatch(
        input_ids=input_ids.reshape(-1)[indices].long(),
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen or 0,
        position_ids=positions,
        token_type_ids=None
        if token_type_ids is None
        else token_type_ids.reshape(-1)[indices].long(),
        indices=indices,
        padded_shape=(batch, length),
        global_tokens=None
        if global_attention_mask is None
        else (global_attention_mask.reshape(-1)[indices] != 0).nonzero().flatten(),
    )


def first_tokens(batch: PackedBatch) -> Tensor:
    """The index of each sequence's first token, int64. On an accelerator every sequence must have a token."""
    first = batch.cu_seqlens[:-1].long()
    return first[batch.cu_seqlens.diff() > 0] if debug.may_read(first) else first


def last_tokens(batch: PackedBatch, pad_token_id: int) -> Tensor:
    """The index of each sequence's last token with another id than ``pad_token_id``, int64; the first token's if there
    is none. On an accelerator every sequence must have a token."""
    first, ids = first_tokens(batch), batch.input_ids
    row = torch.arange(ids.shape[0], device=ids.device)
    sequence = torch.searchsorted(first, row, right=True) - 1
    counted = row.where(ids != pad_token_id, first[sequence])
    return first.scatter_reduce(0, sequence, counted, "amax")


def length_sorted_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """The indices of the sequences in batches of similar length, the longest first.

    Args: lengths: number of tokens of each sequence. batch_size: sequences in a batch; the last batch may have fewer.
    Raises: ValueError for a ``batch_size`` below 1.
    """
    check_batch_size(batch_size)
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def check_batch_size(batch_size: int) -> None:
    """Raise ValueError for a batch of less than one sequence."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}: give more")


def pack_sequences(
    sequences: Sequence[Sequence[int]], token_type_ids: Sequence[Sequence[int]] | None = None
) -> PackedBatch:
    """Pack lists of token ids, for collators.

    Args:
        sequences: the token ids of each sequence.
        token_type_ids: lists of the same lengths, or None.
    Returns: a :class:`PackedBatch` of CPU tensors, without indices.
    Raises: ValueError if the lengths differ.
    """
    lengths = [len(sequence) for sequence in sequences]
    if token_type_ids is not None and [len(types) for types in token_type_ids] != lengths:
        raise ValueError(
            f"token_type_ids must have the lengths of the sequences {lengths}, "
            f"got {[len(types) for types in token_type_ids]}: give one type for every token"
        )
    flat = lambda rows: torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)
    return PackedBatch(
        input_ids=flat(sequences),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths, default=0),
        position_ids=flat(map(range, lengths)),
        token_type_ids=None if token_type_ids is None else flat(token_type_ids),
    )


def pack_targets(
    label_sequences: Sequence[Sequence[int]], start_id: int | None
) -> tuple[PackedBatch, Tensor]:
    """Pack a decoder's inputs and labels. The inputs are the start token, then all labels but the last.

    Args:
        label_sequences: the labels of each target, with the end token. -100: not predicted; such a label may only be at
            the end, because it would be a later token's input.
        start_id: the decoder's start token (``Seq2Seq.decoder_start_token_id``). None: the last label of each target,
            as mBART's language token.
    Returns: the packed inputs, and the labels int64 (tokens,).
    Raises: ValueError for a target without labels, and for -100 before another label.
    """
    inputs = []
    for number, labels in enumerate(label_sequences):
        if not len(labels):
            raise ValueError(
                f"a target must have at least one label, target {number} has none: end it with the end token"
            )
        shifted = [*labels[:-1]]
        if -100 in shifted:
            raise ValueError(
                f"only a target's last label may be -100, because the decoder reads the others as tokens, got -100 at "
                f"{shifted.index(-100)} of target {number}: leave it out, or give the token's id"
            )
        inputs.append([labels[-1] if start_id is None else start_id, *shifted])
    flat = list(chain.from_iterable(label_sequences))
    return pack_sequences(inputs), torch.tensor(flat, dtype=torch.int64)
