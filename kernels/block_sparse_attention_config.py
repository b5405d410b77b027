"""Launch parameters of block-sparse attention's kernels, and what is compiled ahead of time for them."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from fastenc.kernels.attention_tile import shape_constants
from fastenc.kernels.block_sparse_attention_backward import (
    block_sparse_bwd_kv_kernel,
    block_sparse_bwd_q_kernel,
    block_sparse_record_kernel,
)
from fastenc.kernels.block_sparse_attention_forward import block_sparse_fwd_kernel
from fastenc.kernels.launch import tunable

KERNELS: dict[str, Any] = {
    "forward": block_sparse_fwd_kernel,
    "record": block_sparse_record_kernel,
    "backward_kv": block_sparse_bwd_kv_kernel,
    "backward_q": block_sparse_bwd_q_kernel,
}


@tunable(
    "block_sparse_attention",
    bucketed=("max_seqlen",),
    BLOCK=(16, 32, 64),
    num_warps=(4, 8),
    num_stages=(1, 2, 3),
)
def config(kernel: str, head_dim: int, precision: str) -> dict:
    """Launch parameters of a kernel of KERNELS where no table has better ones.

    precision: "half" for 2-byte types, else the precision of float32 products.
    """
    if precision == "ieee":
        # Fused multiply-adds instead of matrix instructions: larger tiles and loads in advance spill.
        return {"BLOCK": 16, "num_warps": 8, "num_stages": 1}
    if precision == "tf32":
        return {"BLOCK": 16 if head_dim > 64 else 32, "num_warps": 4, "num_stages": 1}
    block = 32 if head_dim > 64 else 64
    return {"BLOCK": block, "num_warps": 4 if kernel == "forward" else 8, "num_stages": 2}


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries; a test compiles the rule's launches for them ahead of time."""
    for dim, precision, kernel in product((64, 128), ("half", "tf32", "ieee"), KERNELS):
        dtype = "float16" if precision == "half" else "float32"
        yield {"kernel": kernel, "head_dim": dim, "precision": precision, "dtype": dtype}


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    yield "", KERNELS[key["kernel"]], {**shape_constants({**key, "dropout": True}), "SIZE": 64}
