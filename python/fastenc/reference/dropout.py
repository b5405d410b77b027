"""The library's dropout mask: Philox4x32-7, a function of (seed, offset, stream, row, column) alone.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". The layout of the words is
described in csrc/cpu/philox.h.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox(
    seed: int | Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-7: four outputs of 32 bits for each counter (c0, c1, c2, c3), int64 as the counters are.

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


def philox_words(rng_state: Tensor, stream: int | Tensor, rows: Tensor, num_columns: int) -> Tensor:
    """16 random bits for each element.

    Args:
        rng_state: int64 (2,), seed and offset: the 64-bit key and the low 32 bits of the last counter word. It stays
            on its device.
        stream: 32-bit number, or a tensor that broadcasts with ``rows`` (such as attention heads).
        rows: integer tensor of any shape.
    Returns: int64, rows' shape (broadcast with stream) + (num_columns,), values in [0, 65536).
    """
    column = torch.arange(num_columns, device=rows.device)
    c0 = 16 * (column // 128) + column % 16
    c1 = rows.long().unsqueeze(-1) & _MASK
    if isinstance(stream, int):  # filled in on the device, where a copy of it would wait
        stream = torch.full((), stream, device=rows.device)
    c2 = stream.long().unsqueeze(-1) & _MASK
    seed, offset = rng_state
    counter = torch.broadcast_tensors(c0, c1, c2, offset & _MASK)
    outputs = torch.stack(philox(seed, *counter))
    word = (column % 128) // 16
    output = outputs.gather(0, (word // 2).expand_as(outputs[:1]))[0]
    return torch.where(word % 2 == 0, output & 0xFFFF, output >> 16)


def dropout_scales(
    rng_state: Tensor, stream: int | Tensor, rows: Tensor, num_columns: int, dropout_p: float
) -> Tensor:
    """float32 factors: 0 where dropped, 1 / (probability of keeping) elsewhere.

    The probability is ``dropout_p`` rounded to a multiple of 2^-16, and the scale is that of the rounded one.
    """
    threshold = int(dropout_p * 65536 + 0.5)
    keep = philox_words(rng_state, stream, rows, num_columns) >= threshold
    return keep.to(torch.float32) * (65536 / (65536 - threshold))


def _multiply(a: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * factor, in int64 without overflow."""
    low_part = a * (factor & 0xFFFF)
    high_part = a * (factor >> 16) + (low_part >> 16)
    return high_part >> 16, ((high_part << 16) | (low_part & 0xFFFF)) & _MASK
