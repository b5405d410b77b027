"""Launch parameters of the kernels for short sequences, and what is compiled ahead of time for them."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from fastenc.kernels.attention_short_backward import attention_short_bwd_kernel
from fastenc.kernels.attention_short_forward import attention_short_fwd_kernel
from fastenc.kernels.attention_short_grid import LONGEST
from fastenc.kernels.attention_tile import shape_constants
from fastenc.kernels.launch import tunable, warp_groups

WIDEST = 128  # columns of a head
WIDEST_BACKWARD = 64  # dk and dv of 128 keys fill the registers
# Of the backward with warp groups where heads share keys. They take turns in a loop, through which four warps cannot
# hold dk and dv, nor can eight with more rows.
SHARED_KEYS = {"ROWS": 64, "num_warps": 8}


@tunable(
    "attention_short",
    bucketed=("max_seqlen",),
    candidates=(
        {"ROWS": 32, "num_warps": 8, "maxnreg": 128},  # two programs fit on a multiprocessor
        {"ROWS": 64, "num_warps": 4, "maxnreg": None},
        {"ROWS": 64, "num_warps": 8, "maxnreg": None},
        {"ROWS": 128, "num_warps": 8, "maxnreg": None},
    ),
    # Two stages: a program copies the next rows to shared memory while it computes.
    num_stages=(1, 2),
)
def config(
    head_dim: int, max_seqlen: int, backward: bool, warp_groups: bool, dropout: bool
) -> dict:
    """Launch parameters where no table has better ones.

    warp_groups: the device's matrix instructions run on groups of four warps (wgmma), which needs tiles of 64 rows.

    Where every sequence fits in 64 tokens, tiles have 64 tokens, because less of a tile is masked then. ROWS is the
    largest number of query rows without spills. The backward has fewer, because it also keeps dk and dv.
    """
    small = max_seqlen <= 64
    if warp_groups and head_dim <= 64:
        if small:
            return _launch(64, 64, 4)
        # The fastest of those measured on an H200.
        if backward and dropout and head_dim > 32:
            return _launch(LONGEST, 64, 8)  # 128 rows are 3 % faster with Triton 3.6 and spill
        halves = (head_dim <= 32 and not dropout) if backward else dropout
        return _launch(LONGEST, 64, 4) if halves else _launch(LONGEST, LONGEST, 8)
    rows = 32
    if head_dim <= 32 and (backward or not small):
        rows = 16  # narrow heads leave the compiler so much room that it unrolls past the registers
    elif head_dim <= 64 and small and not backward:
        rows = 64
    return _launch(64, rows, 4) if small else _launch(LONGEST, rows, 8)


def _launch(block: int, rows: int, num_warps: int) -> dict:
    tile = {"BLOCK": block, "ROWS": rows, "num_warps": num_warps}
    return {**tile, "num_stages": 1, "maxnreg": None}


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries; a test compiles the rule's launches for them ahead of time."""
    for dim, length in product((32, 64, 96, 128), (64, 128)):
        for backward in (False, True) if dim <= WIDEST_BACKWARD else (False,):
            key = {"max_seqlen": length, "backward": backward, "head_dim": dim}
            yield {**key, "dropout": True, "dtype": "bfloat16"}
    for backward, dropout in product((False, True), (False, True)):
        key = {"max_seqlen": 128, "backward": backward, "head_dim": 64}
        yield {**key, "dropout": dropout, "dtype": "float16"}
    for backward in (False, True):
        key = {"max_seqlen": 128, "backward": backward, "head_dim": 32}
        yield {**key, "dropout": False, "dtype": "bfloat16"}


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    if not key["backward"]:
        yield "", attention_short_fwd_kernel, shape_constants(key)
        return
    yield "", attention_short_bwd_kernel, shape_constants(key)
    if key["max_seqlen"] > 64:
        constants = {**shape_constants(key), "GROUP": 3, "sums_ptr": None}
        if key["warp_groups"]:
            constants |= SHARED_KEYS
        yield " of shared keys", attention_short_bwd_kernel, constants
    yield " without sums", attention_short_bwd_kernel, {**shape_constants(key), "sums_ptr": None}


def launch_of(max_seqlen: int, backward: bool, arguments: dict) -> dict:
    shared = backward and arguments["GROUP"] > 1
    groups = warp_groups(arguments["q_ptr"].device)
    launch = config(
        arguments["D"],
        LONGEST if shared else min(max_seqlen, LONGEST),
        backward,
        groups,
        arguments["threshold"] > 0,
        like=arguments["q_ptr"],
    )
    return launch | SHARED_KEYS if shared and groups else launch
