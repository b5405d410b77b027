"""Dropout masks on the device: the bits of csrc/cpu/philox.h, so that CPU and GPU draw the same mask.

Philox4x32-7 (Salmon et al. 2011) on (seed, offset, stream, row, column). Columns go in groups of 128; in a group,
column c is 16-bit word c / 16 of the output for the counter (16 * group + c % 16, row, stream, offset). A thread of a
matrix instruction owns columns 16 apart, so the compiler forms one Philox call for eight of its elements.
"""

import triton
import triton.language as tl


@triton.jit
def load_rng(rng_ptr):
    """(seed, offset) of a mask. Kernels that fill the registers load them where they use them."""
    return tl.load(rng_ptr), tl.load(rng_ptr + 1).to(tl.uint32)


@triton.jit
def dropout_scale(rng, stream, row, column, threshold, scale):
    """scale or 0 for each element; row and column broadcast against each other.

    rng: by load_rng; threshold: uint32, an element is kept if its 16 bits are at least that.
    """
    word = (column >> 4) & 7
    zero = (row * 0 + column * 0).to(tl.uint32)
    c0 = zero + (((column >> 7) << 4) + (column & 15)).to(tl.uint32)
    c1 = zero + row.to(tl.uint32)
    c2 = zero + stream
    seed, offset = rng
    c3 = zero + offset
    r0, r1, r2, r3 = tl.philox(seed, c0, c1, c2, c3, n_rounds=7)
    half = word >> 1
    bits = tl.where(half == 0, r0, tl.where(half == 1, r1, tl.where(half == 2, r2, r3)))
    bits = (bits >> ((word & 1) * 16).to(tl.uint32)) & 0xFFFF
    return tl.where(bits >= threshold, scale, 0.0)
