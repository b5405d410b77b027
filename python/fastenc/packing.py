"""Packed batches: the sequences of a batch concatenated, without padding.

The host packs a batch once, before the embeddings. ``fastenc.ops.unpack`` restores the padded layout if it is needed.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from operator import sub
from typing import Any, TypedDict

import torch
from torch import Tensor

from fastenc._base import debug
from fastenc._base.transfer import send

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


@dataclass(frozen=True)
class Documents:
    """Documents whose chunks are the sequences of a packed batch.

    Fields (B = sequences, D = documents):
        cu_chunks: (D+1,) int32, offsets of the documents among the sequences, from 0 to B.
        max_chunks: the largest number of chunks of a document, a host int.
        position_ids: (B,) int64, position of each chunk in its document, from 0.
        groups: (sequences, tokens, longest sequence) of each group, host ints for :meth:`PackedBatch.split`. Inference
            encodes one group at a time.
    """

    cu_chunks: Tensor
    max_chunks: int
    position_ids: Tensor
    groups: tuple[tuple[int, int, int], ...]

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Documents":
        """The same documents with their tensors on ``device``."""
        move = lambda tensor: send(tensor, device, non_blocking)
        return replace(self, cu_chunks=move(self.cu_chunks), position_ids=move(self.position_ids))


class ModelArguments(TypedDict, total=False):
    """A model's keyword arguments, as a collator makes them. Each model's forward describes its own."""

    batch: PackedBatch
    target: PackedBatch
    labels: Tensor
    label_smoothing: float
    max_labels: int
    pair_labels: Tensor
    uniform_samples: Tensor
    documents: Documents
    text_ids: Tensor
    flops_share: Tensor
    spans: Tensor
    windows: Tensor
    starts: Tensor
    ends: Tensor
    word_rows: Tensor
    cu_words: Tensor


def pack_documents(
    chunk_lengths: Sequence[Sequence[int]], tokens_at_once: int = 16_384
) -> Documents:
    """The :class:`Documents` of a batch that holds the chunks in the given order.

    Args:
        chunk_lengths: for each document, the numbers of tokens of its chunks.
        tokens_at_once: largest number of tokens in a group; a single chunk may have more.
    Raises: ValueError for a document without chunks.
    """
    counts = [len(lengths) for lengths in chunk_lengths]
    if 0 in counts:
        raise ValueError(
            f"a document must have at least one chunk, document {counts.index(0)} has none: leave it out of the batch"
        )
    groups: list[tuple[int, int, int]] = []
    sequences = tokens = longest = 0
    for length in chain.from_iterable(chunk_lengths):
        if sequences and tokens + length > tokens_at_once:
            groups.append((sequences, tokens, longest))
            sequences = tokens = longest = 0
        sequences, tokens, longest = sequences + 1, tokens + length, max(longest, length)
    if sequences:
        groups.append((sequences, tokens, longest))
    return Documents(
        cu_chunks=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        max_chunks=max(counts, default=0),
        position_ids=torch.tensor([i for n in counts for i in range(n)], dtype=torch.int64),
        groups=tuple(groups),
    )


def single_chunks(batch: PackedBatch) -> Documents:
    """:class:`Documents` in which each sequence of a batch is a document with one chunk, all in one group."""
    count, device = batch.num_sequences, batch.cu_seqlens.device
    return Documents(
        cu_chunks=torch.arange(count + 1, dtype=torch.int32, device=device),
        max_chunks=min(count, 1),
        position_ids=torch.zeros(count, dtype=torch.int64, device=device),
        groups=((count, batch.total_tokens, batch.max_seqlen),),
    )


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
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


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
                f"a label of -100 may only be a target's last one, target {number} has another: leave it out, because "
                "the decoder's input would be -100 too"
            )
        inputs.append([labels[-1] if start_id is None else start_id, *shifted])
    flat = list(chain.from_iterable(label_sequences))
    return pack_sequences(inputs), torch.tensor(flat, dtype=torch.int64)


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
