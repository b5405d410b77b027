"""The keys and values that a decoder layer keeps from one token to the next."""

from collections.abc import Callable

from torch import Tensor, cat


class LayerCache:
    """Keys and values of one layer: of the target's tokens so far, and of the source's tokens.

    All sequences of a batch have the same number of tokens. A sequence of the source may have several targets, which
    follow each other in the batch (the beams of a search).

    Attributes:
        own: (sequences, tokens, 2, num_heads, head_dim), or None before the first token.
        source: (source_tokens, 2 * num_heads * head_dim), or None before the first token.
    """

    def __init__(self) -> None:
        self.own: Tensor | None = None
        self.source: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of tokens of each sequence so far."""
        return 0 if self.own is None else self.own.shape[1]

    def append(self, keys_values: Tensor) -> Tensor:
        """Add the keys and values (sequences, new_tokens, 2, num_heads, head_dim); returns those of all tokens."""
        self.own = keys_values if self.own is None else cat([self.own, keys_values], 1)
        return self.own

    def of_source(self, compute: Callable[[], Tensor]) -> Tensor:
        """The source's keys and values, which the first call computes."""
        if self.source is None:
            self.source = compute()
        return self.source

    def select(self, sequences: Tensor) -> None:
        """Keep the target sequences with these indices, in this order."""
        if self.own is not None:
            self.own = self.own.index_select(0, sequences)
