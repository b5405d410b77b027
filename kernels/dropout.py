"""Dropout masks, the same as those of reference/dropout.py on every device.

One Philox call gives the key of a row. Two multiplications hash the key with an element's column.
"""

import triton
import triton.language as tl
from torch import Tensor

from fastenc.reference.dropout import threshold_of


def threshold_and_scale(dropout_p: float, rng_state: Tensor | None) -> tuple[int, float]:
    """(threshold of is_kept, factor of what is kept); 0 and 1 without a state."""
    threshold = 0 if rng_state is None else threshold_of(dropout_p)
    return threshold, 65536 / (65536 - threshold)


@triton.jit
def load_rng(rng_ptr):
    """(seed, offset) of a mask. Kernels that fill the registers load them where they use them."""
    return tl.load(rng_ptr), tl.load(rng_ptr + 1).to(tl.uint32)


@triton.jit
def row_keys(rng, stream, row):
    """A row's key: two words of the row's shape. rng: by load_rng."""
    seed, offset = rng
    zero = (row * 0).to(tl.uint32)
    words = tl.philox(seed, zero, row.to(tl.uint32), zero + stream, zero + offset, n_rounds=7)
    return words[0], words[1]


@triton.jit
def spread(column):
    """A column's share of the hash; linear, modulo 2^32, so that differences of columns are differences of these."""
    return column.to(tl.uint32) * 0x9E3779B1


@triton.jit
def is_kept(keys, spread_column, threshold):
    """Whether elements are kept; keys, by row_keys, and spread columns broadcast against each other.

    threshold: int32, an element is kept if its 16 bits are at least that.
    """
    h = (keys[0] ^ spread_column) * 0x85EBCA6B
    h = (h ^ (h >> 15) ^ keys[1]) * 0xC2B2AE35
    return h >= (threshold.to(tl.uint32) << 16)
