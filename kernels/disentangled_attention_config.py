"""Launch parameters of disentangled attention's kernels, and what is compiled ahead of time for them."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from fastenc.kernels.attention_tile import shape_constants
from fastenc.kernels.disentangled_attention_backward import (
    disentangled_bwd_kernel,
    disentangled_record_kernel,
)
from fastenc.kernels.disentangled_attention_forward import disentangled_fwd_kernel
from fastenc.kernels.disentangled_attention_gradients import (
    disentangled_bwd_rows_kernel,
    disentangled_bwd_tables_kernel,
)
from fastenc.kernels.launch import tunable

KERNELS: dict[str, Any] = {
    "forward": disentangled_fwd_kernel,
    "record": disentangled_record_kernel,
    "backward": disentangled_bwd_kernel,
    "backward_rows": disentangled_bwd_rows_kernel,
    "backward_tables": disentangled_bwd_tables_kernel,
}


@tunable(
    "disentangled_attention",
    bucketed=("max_seqlen",),
    BLOCK=(32, 64, 128),
    num_warps=(4, 8),
    num_stages=(1, 2, 3),
)
def config(kernel: str, head_dim: int, precision: str, warp_groups: bool) -> dict:
    """Launch parameters of a kernel of KERNELS where no table has better ones; only the forward's were tuned.

    precision: "half" for 2-byte types, else the precision of float32 products.
    """
    if precision == "ieee":
        # Fused multiply-adds instead of matrix instructions: larger tiles spill.
        return _launch(16, 1)
    # Smaller matrix instructions hold their operands in registers, too many of them for larger tiles.
    block = 64 if precision == "half" and warp_groups else 32
    # The other kernels would need the shared memory of a second program to load in advance.
    in_advance = precision == "half" and kernel in ("backward_rows", "backward_tables")
    return _launch(block, 3 if in_advance else 1)


def _launch(block: int, num_stages: int) -> dict:
    return {"BLOCK": block, "num_warps": 4, "num_stages": num_stages}


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries; a test compiles the rule's launches for them ahead of time."""
    for dim, precision, kernel in product((32, 64), ("half", "tf32", "ieee"), KERNELS):
        dtype = "float16" if precision == "half" else "float32"
        key = {"kernel": kernel, "head_dim": dim, "precision": precision}
        yield {**key, "dropout": True, "dtype": dtype}


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    kernel, constants = KERNELS[key["kernel"]], shape_constants(key)
    constants = {name: constants[name] for name in constants if name in kernel.arg_names}
    if key["kernel"] != "backward_rows":
        yield "", kernel, constants
        return
    for sign, variant in ((1, " of queries"), (-1, " of keys")):
        yield variant, kernel, {**constants, "SIGN": sign}
