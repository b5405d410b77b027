"""Mean and reciprocal standard deviation of rows that a program holds in registers, for the norms' forwards."""

import triton
import triton.language as tl


@triton.jit
def row_statistics(
    row_chunks,
    sums,
    eps,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    RMS: tl.constexpr,
):
    """(mean, rstd), both (rows, 1), of rows in registers; sums: of their chunks.

    The mean has the sum's rounding error: equal elements would deviate from it, and a small eps would make that large.
    The mean of the deviations is that error. It corrects the mean, and the variance as E[d^2] - E[d]^2.
    Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance".
    """
    mean = tl.sum(sums, 1)[:, None] * (1.0 / WIDTH)
    if RMS:
        mean = mean * 0.0
    deviations = tl.zeros_like(sums)
    squares = tl.zeros_like(sums)
    for c in tl.static_range(CHUNKS):
        column = (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
        deviation = row_chunks[c] - mean
        if CHUNK * CHUNKS != WIDTH:
            deviation = tl.where(column < WIDTH, deviation, 0.0)
        deviations += deviation
        squares += deviation * deviation
    variance = tl.sum(squares, 1)[:, None] * (1.0 / WIDTH)
    if not RMS:
        error = tl.sum(deviations, 1)[:, None] * (1.0 / WIDTH)
        mean += error
        # Where the variance has overflowed, the square of the error may have, too.
        corrected = tl.maximum(variance - error * error, 0.0)
        variance = tl.where(variance < float("inf"), corrected, variance)
    return mean, tl.div_rn(1.0, tl.sqrt_rn(variance + eps))  # rstd's error would be the whole row's
