"""Launch parameters of attention's forward and backward, and what is compiled ahead of time for them."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from fastenc.kernels.attention_arguments import is_biased
from fastenc.kernels.attention_backward import attention_bwd_kv_kernel, attention_bwd_q_kernel
from fastenc.kernels.attention_forward import attention_fwd_kernel
from fastenc.kernels.attention_qkv import precision_of
from fastenc.kernels.attention_tile import shape_constants
from fastenc.kernels.launch import tunable, warp_groups


def _launch(
    block_m: int, block_n: int, num_warps: int, num_stages: int = 2, maxnreg: int | None = None
) -> dict:
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps}
    return {**tile, "num_stages": num_stages, "maxnreg": maxnreg}


# Launches of backward_kv to try. Fewer registers leave room for more programs on a multiprocessor.
_BACKWARD = (
    _launch(64, 64, 4, 3),
    _launch(32, 64, 4, 3, 168),
    _launch(64, 64, 4, 2, 168),
    _launch(32, 128, 8, 2, 128),
    _launch(64, 128, 4, 3),
)


@tunable(
    "attention",
    bucketed=("max_seqlen",),
    candidates=(
        # Two kernels add nothing atomically, and compute the scores twice.
        *({**launch, "ATOMIC": atomic} for launch, atomic in product(_BACKWARD, (True, False))),
        _launch(64, 64, 4, 3),
        _launch(128, 64, 8, 3, 128),
    ),
    num_stages=(2, 3, 4),
)
def config(
    kernel: str, head_dim: int, precision: str, biased: bool, warp_groups: bool, dropout: bool
) -> dict:
    """Launch parameters of "forward", "backward_kv" or "backward_q" where no table has better ones.

    precision: "half" for 2-byte types, else the precision of float32 products. biased: there is a window or a bias.
    warp_groups: the device's matrix instructions run on groups of four warps (wgmma), which needs tiles of 64 rows.

    "backward_kv" has ATOMIC: whether it adds dq atomically; if not, "backward_q" computes it.

    64 query rows take 4 warps, because 8 warps would compute each softmax twice. Without warp groups backward_kv, which
    keeps two accumulators and five operands, takes 32 rows at a time: 64 rows spill.
    """
    if warp_groups and precision == "half" and head_dim <= 64 and not biased:
        return _of_warp_groups(kernel, head_dim, dropout)
    launch = _tile_and_warps(kernel, head_dim, precision, biased)
    return {**launch, "ATOMIC": True} if kernel == "backward_kv" else launch


def _of_warp_groups(kernel: str, head_dim: int, dropout: bool) -> dict:
    """The fastest of those measured on an H200.

    Two programs fit on a multiprocessor; one larger program is slower, although it reads less from the L2 cache.
    """
    if kernel != "backward_kv":
        return _launch(128, 64, 8, 3, maxnreg=128 if kernel == "forward" else None)
    if dropout or head_dim > 32:
        # Computing the scores twice is cheaper than adding dq atomically, but with dropout the mask costs more.
        return {**_launch(64, 64, 4, 3), "ATOMIC": dropout}
    return {**_launch(64, 128, 4, 3), "ATOMIC": True}


def _tile_and_warps(kernel: str, head_dim: int, precision: str, biased: bool) -> dict:
    if head_dim > 128:
        return _of_wide_heads(kernel)
    if precision == "ieee":
        # Fused multiply-adds instead of matrix instructions: larger tiles spill.
        if kernel == "backward_kv":
            return _launch(16, 16, 8)
        return _launch(32, 32, 8) if head_dim <= 64 else _launch(32, 16, 8)
    if head_dim > 64 and precision == "tf32":
        return _launch(32, 16 if kernel == "backward_kv" else 32, 4)
    if kernel == "backward_kv" and head_dim > 64:
        return _launch(32, 64, 8) if head_dim > 96 else _launch(32, 32, 8 if biased else 4)
    if kernel == "backward_kv":
        return _launch(32, 32 if precision == "tf32" and head_dim > 32 else 64, 4)
    # A bias and TF32 take registers as a wider head does.
    if head_dim > 64 or (head_dim > 32) + biased + (precision == "tf32") >= 2:
        return _launch(64, 32, 4)
    return _launch(64, 64, 4)


def _of_wide_heads(kernel: str) -> dict:
    """For heads of more than 128 columns, in 2-byte types: eight warps hold dk and dv, 32 rows of 256 floats each."""
    if kernel == "backward_kv":
        return _launch(16, 32, 8)
    return _launch(64 if kernel == "forward" else 32, 32, 8)


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries; a test compiles the rule's launches for them ahead of time."""
    for dim, precision, biased in product(
        (32, 64, 96, 128, 256), ("half", "tf32", "ieee"), (False, True)
    ):
        if dim > 128 and precision != "half":
            continue
        dtype = "bfloat16" if precision == "half" else "float32"
        key = {"head_dim": dim, "precision": precision, "biased": biased, "dtype": dtype}
        for kernel in ("forward", "backward_kv", "backward_q"):
            yield {"kernel": kernel, **key, "dropout": True}
    for kernel, dropout in product(("forward", "backward_kv", "backward_q"), (False, True)):
        key = {"kernel": kernel, "head_dim": 64, "precision": "half", "biased": False}
        yield {**key, "dropout": dropout, "dtype": "float16"}
    key = {"kernel": "backward_kv", "head_dim": 32, "precision": "half", "biased": False}
    yield {**key, "dropout": False, "dtype": "bfloat16"}


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    kernel = {
        "forward": attention_fwd_kernel,
        "backward_q": attention_bwd_q_kernel,
        "backward_kv": attention_bwd_kv_kernel,
    }[key["kernel"]]
    constants = {**shape_constants(key), "WINDOW": key["biased"]}
    without_biases = dict.fromkeys(("alibi_ptr", "relative_ptr", "key_bias_ptr"))
    if not key["biased"]:
        constants |= without_biases
    yield "", kernel, constants
    if key["head_dim"] == 64 and not key["biased"] and key["precision"] == "half":
        yield " in a grid", kernel, {**constants, "blocks_ptr": None}
    if key["head_dim"] != 64:  # one head_dim stands for all in the variants below
        return
    if key["dtype"] == "bfloat16":
        yield " of shared keys", kernel, {**constants, "GROUP": 3, "sums_ptr": None}
    if key["kernel"] == "backward_kv":
        yield " alone", kernel, {**constants, "wide_dq_ptr": None, "finished_ptr": None}
    if key["biased"] and key["precision"] == "half":
        yield " window alone", kernel, {**constants, **without_biases}
        for name in without_biases:
            others = dict.fromkeys(other for other in without_biases if other != name)
            yield f" {name} alone", kernel, {**constants, **others, "WINDOW": False}
        # T5's decoder: a causal window and a relative bias.
        others = dict.fromkeys(("alibi_ptr", "key_bias_ptr"))
        yield " window and relative_ptr alone", kernel, {**constants, **others}


def launch_of(kernel: str, max_seqlen: int, arguments: dict) -> dict:
    """The parameters of a launch. arguments: by shared_arguments()."""
    return config(
        kernel,
        arguments["D"],
        precision_of(arguments),
        is_biased(arguments),
        warp_groups(arguments["q_ptr"].device),
        arguments["threshold"] > 0,
        like=arguments["q_ptr"],
        max_seqlen=max_seqlen,
    )
