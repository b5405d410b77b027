"""The library's dropout mask, a function of (seed, offset, stream, row, column) alone.

    key_0, key_1 = the first two outputs of Philox4x32-7 for the counter (0, row, stream, offset) and the key seed
    h = (key_0 xor column * 0x9E3779B1) * 0x85EBCA6B
    h = (h xor (h >> 15) xor key_1) * 0xC2B2AE35                  (modulo 2^32)

An element is kept if the upper 16 bits of h are at least the threshold. Philox makes rows independent of each other.
The hash of a column is cheap enough to be computed for each element by itself, so an implementation may process the
columns in any order and grouping. ``benchmarks/studies/dropout_battery.py`` tests the randomness of the masks.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox). The multipliers are those of
MurmurHash3's last step and the golden ratio times 2^32.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox(
    seed: int | Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-7: four 32-bit outputs for each counter (c0, c1, c2, c3). Counters and outputs are int64 tensors.

    Args:
        seed: 64-bit key; a tensor is not read back to the host.
    """
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(7):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def row_keys(rng_state: Tensor, stream: int | Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """64 random bits for each row, as two words of 32.

    Args:
        rng_state: int64 (2,), seed and offset: the 64-bit key, and the last word of the counter (its low 32 bits). It
            is not read back to the host.
        stream: 32-bit number, or a tensor that broadcasts with ``rows`` (such as attention heads).
        rows: integer tensor of any shape.
    Returns: two int64 tensors of rows' shape (broadcast with stream), values in [0, 2^32).
    """
    if isinstance(stream, int):  # filled on the device; a copy from the host would wait
        stream = torch.full((), stream, device=rows.device)
    seed, offset = rng_state
    row, stream, offset = rows.long() & _MASK, stream.long() & _MASK, offset & _MASK
    counter = torch.broadcast_tensors(torch.zeros_like(row), row, stream, offset)
    return philox(seed, *counter)[:2]


def hash_columns(keys: tuple[Tensor, Tensor], columns: Tensor) -> Tensor:
    """32 random bits for each element: int64, the keys' shape + columns' shape (n,)."""
    key0, key1 = (key.unsqueeze(-1) for key in keys)
    h = ((key0 ^ (columns * 0x9E3779B1 & _MASK)) * 0x85EBCA6B) & _MASK
    return ((h ^ (h >> 15) ^ key1) * 0xC2B2AE35) & _MASK


def threshold_of(dropout_p: float) -> int:
    """An element is kept if its 16 random bits are at least this; at most 65,535, because 65,536 would keep nothing."""
    return min(int(dropout_p * 65536 + 0.5), 65535)


def dropout_scales(
    rng_state: Tensor, stream: int | Tensor, rows: Tensor, num_columns: int, dropout_p: float
) -> Tensor:
    """float32 factors: 0 where dropped, 1 / (probability of keeping) elsewhere.

    Returns: the shape of rows (broadcast with stream) + (num_columns,).
    ``dropout_p`` is rounded to a multiple of 2^-16 below 1, and the factor is that of the rounded probability.
    """
    threshold = threshold_of(dropout_p)
    columns = torch.arange(num_columns, device=rows.device)
    keep = hash_columns(row_keys(rng_state, stream, rows), columns) >> 16 >= threshold
    return keep.to(torch.float32) * (65536 / (65536 - threshold))


def _multiply(a: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * factor, in int64 without overflow."""
    low_part = a * (factor & 0xFFFF)
    high_part = a * (factor >> 16) + (low_part >> 16)
    return high_part >> 16, ((high_part << 16) | (low_part & 0xFFFF)) & _MASK
