"""The keys and values that a decoder layer keeps from one token to the next."""

from collections.abc import Callable

import torch
from torch import Tensor

FIRST_ROOM = 16  # tokens for which the first call makes room


class LayerCache:
    """Keys and values of one layer: of the target's tokens so far, and of the source's tokens. For calls without
    gradients.

    All sequences of a batch have the same number of tokens. A sequence of the source may have several targets, which
    follow each other in the batch (the beams of a search).

    The memory is (2, room, sequences, num_heads, head_dim). A token's keys and values are written behind those of the
    token before it, so earlier ones are copied only when the room is full and doubles.

    Attributes:
        length: the number of tokens of each sequence so far.
        source: (source_tokens, 2 * num_heads * head_dim), or None before the first token.
    """

    def __init__(self) -> None:
        self.length = 0
        self.source: Tensor | None = None
        self._memory: Tensor | None = None
        self._spare: Tensor | None = None  # as _memory: what select() writes to

    def append(self, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values (sequences, new_tokens, 2, num_heads, head_dim).

        Returns: keys and values of all tokens, each a view (tokens, sequences * num_heads, head_dim).
        """
        new = keys_values.permute(2, 1, 0, 3, 4)
        if self._memory is None:
            self._memory = _memory_like(new, [2, 0, *new.shape[2:]])
        memory, end = self.with_room(new.shape[1]), self.length + new.shape[1]
        memory[:, self.length : end] = new
        self.length = end
        keys, values = memory[:, :end].flatten(2, 3)
        return keys, values

    def with_room(self, tokens: int) -> Tensor:
        """The memory, with room for ``tokens`` more tokens of each sequence. It is made larger if it has less."""
        memory, length = self._memory, self.length
        assert memory is not None  # the first tokens were added with append()
        if memory.shape[1] < length + tokens:
            room = max(2 * length, length + tokens, FIRST_ROOM)
            larger = _memory_like(memory, [2, room, *memory.shape[2:]])
            larger[:, :length] = memory[:, :length]
            memory = self._memory = larger
        return memory

    def of_source(self, compute: Callable[[], Tensor]) -> Tensor:
        """The source's keys and values, which the first call computes."""
        if self.source is None:
            self.source = compute()
        return self.source

    def select(self, sequences: Tensor) -> None:
        """Keep the target sequences with these indices, in this order."""
        if self._memory is None:
            return
        shape = list(self._memory.shape)
        shape[2] = len(sequences)
        if self._spare is None or list(self._spare.shape) != shape:
            self._spare = _memory_like(self._memory, shape)
        for part, chosen in zip(self._memory, self._spare, strict=True):
            kept = chosen[: self.length]
            torch.index_select(part[: self.length], 1, sequences, out=kept)
        self._memory, self._spare = self._spare, self._memory


def _memory_like(x: Tensor, shape: list[int]) -> Tensor:
    """Memory that a call outside of ``torch.inference_mode()`` may write to, too."""
    with torch.inference_mode(False):
        return x.new_empty(shape)
