"""Random permutations whose entries are computed on demand."""

import hashlib

from torch import Tensor

ROUNDS = 6
_MASK = 0x7FFFFFFF


class Permutation:
    """A pseudo-random permutation of 0 … size − 1 whose entries are computed on demand.

    It is a balanced Feistel network over an even number of bits, the smallest that holds ``size``. A result that is not
    below ``size`` goes through the network again, fewer than four times on average. Memory and the cost of an entry do
    not depend on the size.

    Args:
        size: at least 1, below 2^60.
        seed: strings and integers. The permutation depends on them and on the size only.
    Raises: ValueError for another size.
    Source: Luby & Rackoff 1988 (the network); Black & Rogaway 2002 (cycle walking).
    """

    def __init__(self, size: int, *seed: int | str):
        if not 1 <= size < 2**60:
            raise ValueError(
                f"size must be at least 1 and below 2^60, got {size}: give a size in this range"
            )
        self.size = size
        self._half = max(1, -(-(size - 1).bit_length() // 2))
        digest = hashlib.shake_128(" ".join(map(str, seed)).encode()).digest(4 * ROUNDS)
        words = (digest[start : start + 4] for start in range(0, 4 * ROUNDS, 4))
        self._keys = [int.from_bytes(word, "little") & _MASK for word in words]

    def __call__(self, entries: Tensor) -> Tensor:
        """The permutation's values at these entries (int64, each in [0, size)): int64, of the same shape."""
        permuted = self._network(entries.flatten())
        outside = (permuted >= self.size).nonzero().squeeze(1)
        while len(outside):
            walked = self._network(permuted[outside])
            permuted[outside] = walked
            outside = outside[walked >= self.size]
        return permuted.reshape(entries.shape)

    def _network(self, values: Tensor) -> Tensor:
        low = (1 << self._half) - 1
        left, right = values >> self._half, values & low
        for key in self._keys:
            left, right = right, left ^ (_hash(right ^ key) & low)
        return left << self._half | right


def _hash(values: Tensor) -> Tensor:
    """A 31-bit hash: each bit of the result depends on every bit of the input. Products stay below 2^62.

    Source: the form and multiplier of Mueller's integer hash.
    """
    for _ in range(2):
        values = ((values ^ (values >> 16)) * 0x45D9F3B) & _MASK
    return values ^ (values >> 16)
