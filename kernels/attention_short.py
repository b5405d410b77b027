"""Self-attention of short sequences: one tile of 64 or 128 tokens holds several whole sequences.

    out = dropout(softmax(scale * q k^T)) v inside each sequence

All keys of a sequence are in its tile, so the softmax needs no running statistics. Keys of other sequences in the tile
are masked. There are no atomics, and the result is deterministic.

Bytes: forward 4 T H D elements, backward 7.
"""

from math import prod

import torch
from fastenc.kernels.attention_short_backward import attention_short_bwd_kernel
from fastenc.kernels.attention_short_config import launch_of
from fastenc.kernels.attention_short_forward import attention_short_fwd_kernel
from fastenc.kernels.attention_short_grid import tiles_of
from fastenc.kernels.attention_short_record import query_records
from fastenc.kernels.run import run
from fastenc.kernels.sequence_bounds import sequence_bounds
from torch import Tensor


def forward(
    out: Tensor, lse: Tensor, bounds: Tensor | None, max_seqlen: int, arguments: dict
) -> None:
    """Write out and lse.

    bounds: the result of sequence_bounds, or None to compute it here. arguments: by shared_arguments().
    """
    if arguments["total_q"]:
        launch = launch_of(max_seqlen, False, arguments)
        tiles = tiles_of(arguments, max_seqlen, launch)
        named = _with_bounds(arguments, bounds, max_seqlen, tiles)
        named |= {"out_ptr": out, "lse_ptr": lse}
        _run(attention_short_fwd_kernel, (prod(tiles), arguments["H"]), launch, named)


def backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    lse: Tensor,
    bounds: Tensor | None,
    max_seqlen: int,
    wants_sums: bool,
    arguments: dict,
) -> Tensor | None:
    """Write the gradients dq, dk and dv, of which dk and dv have the same token stride.

    bounds: as in forward. arguments: by shared_arguments(), and dout_ptr.
    Returns: their sums over each tile's tokens, float32 (tiles, 3, H, D), or None.
    """
    if not arguments["total_q"]:
        return None
    dq, dk, dv = gradients
    launch = launch_of(max_seqlen, True, arguments)
    tiles = tiles_of(arguments, max_seqlen, launch)
    sums = None
    if wants_sums:
        shape = (prod(tiles), 3, arguments["H"], arguments["D"])
        sums = torch.zeros(shape, dtype=torch.float32, device=dq.device)
    named = _with_bounds(arguments, bounds, max_seqlen, tiles)
    named |= {
        "dq_ptr": dq,
        "dk_ptr": dk,
        "dv_ptr": dv,
        "record_ptr": query_records(lse, named),
        "sums_ptr": sums,
        "stride_dq": dq.stride(0),
        "stride_dkv": dk.stride(0),
    }
    key_heads = arguments["H"] // arguments["GROUP"]
    _run(attention_short_bwd_kernel, (prod(tiles), key_heads), launch, named)
    return sums


def _with_bounds(
    arguments: dict, bounds: Tensor | None, max_seqlen: int, tiles: tuple[int, int]
) -> dict:
    """The arguments that the kernels for short sequences share."""
    total_tokens = arguments["total_q"]
    if bounds is None:
        bounds = sequence_bounds(arguments["cu_seqlens_q_ptr"], total_tokens, max_seqlen)
    return arguments | {"bounds_ptr": bounds, "total_tokens": total_tokens, "tiles": tiles[1]}


def _run(kernel, grid: tuple[int, int], launch: dict, named: dict) -> None:
    """Run a kernel; of ``named`` it gets what it has parameters for."""
    taken = {name: named[name] for name in kernel.arg_names if name in named}
    run(kernel, grid, **taken, **launch)
