"""Launch parameters of the norms, and what is compiled ahead of time for them."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import triton
from fastenc.kernels.launch import tunable
from fastenc.kernels.layer_norm_backward import layer_norm_bwd_kernel
from fastenc.kernels.layer_norm_forward import layer_norm_fwd_kernel

LANES_BYTES = 512  # bytes that a warp reads at a time, 16 per lane


def chunks(width: int, itemsize: int) -> tuple[int, int]:
    """(columns of a chunk, number of chunks).

    A chunk is a power of two of columns that divides the width into at most 8 chunks. A width without such a divisor
    takes one masked chunk. Up to 1,024 columns, a chunk is at most what a warp reads at a time.
    """
    chunk = width & -width
    if width <= 1024:
        chunk = min(chunk, LANES_BYTES // itemsize)
    if chunk >= 64 and width // chunk <= 8:
        return chunk, width // chunk
    return triton.next_power_of_2(width), 1


@tunable(
    "layer_norm",
    # For the backward only.
    candidates=(
        *(
            {"STAGES": stages, "PROGRAMS": programs}
            for stages, programs in ((2, 2), (3, 2), (4, 2), (3, 3))
        ),
        # Two warps share a row. Each has half as many registers, so twice as many fit on a multiprocessor.
        *(
            {"ROWS": rows, "num_warps": 2 * rows, "STAGES": 3, "PROGRAMS": 8 // rows}
            for rows in (4, 2, 1)
        ),
        {"ROWS": 1, "num_warps": 1, "STAGES": 3, "PROGRAMS": 8},  # no warp waits for another
    ),
    ROWS=(4, 8),
    num_warps=(4, 8),
)
def config(width: int, itemsize: int, backward: bool) -> dict:
    """Launch parameters where no table has better ones.

    Narrow rows: each warp has one or more whole rows. Wide rows: all warps share a row.

    The backward has STAGES, the turns of its loop whose rows are in shared memory at a time (1: none), and PROGRAMS,
    for each multiprocessor: as many as its registers hold. With the widest rows they hold one program, and the
    second one waits.
    """
    chunk, count = chunks(width, itemsize)
    if chunk * itemsize <= LANES_BYTES:
        rows, warps = 4 * LANES_BYTES // (chunk * itemsize), 4
    else:
        # About 1,024 elements for each warp of a program stay in registers. Triton needs a power of two of rows.
        rows = 1 << (min(8, (1024 if backward else 2048) // (chunk * count)) or 1).bit_length() - 1
        warps = max(4, triton.next_power_of_2(width) // (512 if backward else 1024))
    launch = {"CHUNK": chunk, "CHUNKS": count, "ROWS": rows, "num_warps": warps}
    if backward:
        stages = (3 if itemsize == 2 else 2) if chunk * itemsize <= LANES_BYTES else 1
        launch |= {"STAGES": stages, "PROGRAMS": backward_programs(width)}
    return launch


def backward_programs(width: int) -> int:
    """Number of programs of a backward for each multiprocessor."""
    return 4 if width <= 256 else 2


# With these widths a test compiles every launch that the rule gives for transformers' usual widths.
_WIDTHS = (256, 512, 640, 1536, 2048, 2560, 3072, 3584, 5120, 6144, 7168)


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries; a test compiles the rule's launches for them ahead of time."""
    in_float32 = (128, 384, 768, 1024, 4096, 8192)
    for width, backward in product(sorted({*in_float32, *_WIDTHS}), (False, True)):
        for dtype in ("bfloat16", "float32") if width in in_float32 else ("bfloat16",):
            key = {"width": width, "itemsize": 2 if dtype == "bfloat16" else 4}
            yield {**key, "backward": backward, "dropout": True, "dtype": dtype}
    for backward in (False, True):
        key = {"width": 768, "itemsize": 2, "backward": backward}
        yield {**key, "dropout": False, "dtype": "float16"}


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    flags = {"HAS_WEIGHT": True, "HAS_DROPOUT": key["dropout"], "WIDTH": key["width"]}
    chunk, count = chunks(key["width"], key["itemsize"])
    flags |= {"CHUNK": chunk, "CHUNKS": count}
    if key["backward"]:
        kernel = layer_norm_bwd_kernel
        flags |= {"WANTS_AFFINE": True, "WANTS_X_BIAS": True, "HAS_DRESIDUAL_SUM": True}
    else:
        kernel = layer_norm_fwd_kernel
        flags |= {"HAS_RESIDUAL": True, "HAS_X_BIAS": True, "SAVE_H": True, "SAVE_STATISTICS": True}
    biased = {} if key["backward"] else {"HAS_BIAS": True}
    yield "", kernel, {**flags, "RMS": False, **biased}
    if key["width"] == 768:  # RMSNorm leaves out a sum; one width stands for all
        biased = {} if key["backward"] else {"HAS_BIAS": False}
        yield " rms", kernel, {**flags, "RMS": True, **biased}
