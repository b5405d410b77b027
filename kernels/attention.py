"""Non-causal attention over packed sequences of any length, forward and backward, by online softmax.

    out = dropout(softmax(s)) v,  s = scale * q k^T + bias inside each sequence;  lse = log sum_j exp(s[i, j])

The kernels for sequences of any length are those of attention_forward.py, attention_delta.py, attention_backward.py
and, for the gradient of relative biases, attention_relative.py. Where short sequences fit, the kernels of
attention_short.py take these.

With grouped queries, GROUP heads of q read one head of k and v, and nothing is copied.

q, k and v have separate strides. So a packed qkv is read in place, and its gradient is written in place.
Bytes: forward reads q, k, v and writes out, 4 T H D elements. FLOPs: 4 H D sum(length^2) forward, 10 backward.
Source: Dao 2023, arXiv:2307.08691.
"""

from typing import NamedTuple

import torch
from fastenc.kernels import attention_short
from fastenc.kernels.attention_arguments import is_biased, shared_arguments
from fastenc.kernels.attention_backward import attention_bwd_kv_kernel, attention_bwd_q_kernel
from fastenc.kernels.attention_call import AttentionCall
from fastenc.kernels.attention_config import launch_of
from fastenc.kernels.attention_delta import query_records
from fastenc.kernels.attention_forward import attention_fwd_kernel
from fastenc.kernels.attention_grid import block_grid
from fastenc.kernels.attention_qkv import precision_of
from fastenc.kernels.attention_relative import config as relative_config
from fastenc.kernels.attention_relative import relative_bias_gradient
from fastenc.kernels.attention_short_config import WIDEST, WIDEST_BACKWARD
from fastenc.kernels.attention_short_grid import LONGEST
from fastenc.kernels.batch_invariance import is_batch_invariant
from fastenc.kernels.column_sum import column_sum
from fastenc.kernels.rotary import rotary as rotated
from fastenc.kernels.rotary import rotate_into
from fastenc.kernels.run import run
from torch import Tensor


class _Division(NamedTuple):
    """Which kernels take which sequences of a batch.

    Fields:
        short: whether the kernels for short sequences take the short ones.
        any_length: whether the kernels for any length take the others (all, if ``short`` is False).
        blocks: the table of blocks for the kernels for any length, or None for a grid over the longest sequence.
    """

    short: bool
    any_length: bool
    blocks: Tensor | None


def _divide(arguments: dict, attention_call: AttentionCall, widest: int) -> _Division:
    """widest: columns of the widest heads that the kernels for short sequences take."""
    if is_batch_invariant(arguments["q_ptr"].device.type):
        # In a tile for short sequences, sums depend on where in it a sequence begins. A launch of the kernels for any
        # length does not depend on the lengths of the batch then.
        return _Division(False, True, None)
    fits = (
        attention_call.cu_seqlens_k is None
        and arguments["q_ptr"].element_size() == 2  # float32 would not fit in its tiles
        and arguments["D"] <= widest
        and not is_biased(arguments)
    )
    if fits and attention_call.max_seqlen_q <= LONGEST:
        return _Division(True, False, None)
    if fits and attention_call.long_blocks is not None:
        return _Division(True, True, attention_call.long_blocks)
    of_other_keys = attention_call.cu_seqlens_k is not None  # a table has the queries' blocks alone
    return _Division(False, True, None if of_other_keys else attention_call.all_blocks)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    """(out (total_q, H, D), lse (H, total_q) float32). ``arguments``: the fields of an AttentionCall."""
    q, k, attention_call = _rotated(q, k, AttentionCall(*arguments))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    shared = shared_arguments(q, k, v, attention_call)
    division = _divide(shared, attention_call, WIDEST)
    if division.short:
        attention_short.forward(
            out, lse, attention_call.bounds, attention_call.max_seqlen_q, shared
        )
    if division.any_length:
        launch = launch_of("forward", attention_call.max_seqlen_q, shared)
        of_grid, grid = block_grid(
            division.blocks, attention_call.max_seqlen_q, launch["BLOCK_M"], shared
        )
        if 0 not in grid:
            run(
                attention_fwd_kernel,
                grid,
                out_ptr=out,
                lse_ptr=lse,
                **of_grid,
                **shared,
                **launch,
            )
    return out, lse


def _rotated(
    q: Tensor, k: Tensor, attention_call: AttentionCall
) -> tuple[Tensor, Tensor, AttentionCall]:
    """Queries and keys rotated by the angles of their positions, and the call without the table of rotary angles."""
    if attention_call.rotary is None:
        return q, k, attention_call
    if attention_call.cu_seqlens_k is not None:
        raise ValueError(
            "attention: rotary needs queries and keys of the same sequences, got cu_seqlens_k: "
            "rotate them before with fastenc.ops.rotary"
        )
    of_rotation = (
        attention_call.rotary,
        attention_call.cu_seqlens_q,
        attention_call.max_seqlen_q,
        False,
    )
    q, k = (rotated(x, *of_rotation) for x in (q, k))
    return q, k, attention_call._replace(rotary=None)


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, drelative_bias, dbias), or if packed (dqkv, empty, empty, drelative_bias, dbias); contiguous.

    rest: the fields of an AttentionCall; then packed, wants_relative_bias and wants_bias.
    """
    *arguments, packed, wants_relative_bias, wants_bias = rest
    attention_call = AttentionCall(*arguments)
    q, k, rotated_call = _rotated(q, k, attention_call)
    # The kernels take the sum of dk over the tokens as 0, because a constant added to all scores of a query changes no
    # probability. That does not hold for keys before their rotation, or with a gradient through lse. With heads that
    # share keys, the sums would not fit in the registers.
    in_kernels = wants_bias and attention_call.rotary is None and dlse is None
    in_kernels = in_kernels and q.shape[1] == k.shape[1]
    wants = (packed, wants_relative_bias, in_kernels)
    *results, dbias = _backward(dout, dlse, out, lse, q, k, v, rotated_call, *wants)
    if attention_call.rotary is not None:
        heads = [x.shape[1] for x in (q, k, v)]
        dq, dk = results[0].split(heads, 1)[:2] if packed else results[:2]
        for gradient in (dq, dk):
            rotate_into(
                gradient,
                gradient,
                attention_call.rotary,
                attention_call.cu_seqlens_q,
                attention_call.max_seqlen_q,
                True,
            )
    if wants_bias and not in_kernels:
        dbias = column_sum(results[0].flatten(1))
    return (*results, dbias)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_call: AttentionCall,
    packed: bool,
    wants_relative_bias: bool,
    wants_bias: bool,
) -> tuple[Tensor, ...]:
    """As attention_backward, for queries and keys that are rotated already.

    dq is added atomically, or computed by a second kernel under torch.use_deterministic_algorithms or where the launch
    parameters say that this is faster.
    """
    nothing = lambda: q.new_empty(0)
    heads = [x.shape[1] for x in (q, k, v)]
    if packed:
        dqkv = q.new_empty((q.shape[0], sum(heads), q.shape[2]))
        (dq, dk, dv), results = dqkv.split(heads, 1), (dqkv, nothing(), nothing())
    else:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        if attention_call.cu_seqlens_k is not None:
            dq.zero_()  # no kernel writes the rows of a sequence without keys
        results = (dq, dk, dv)
    arguments = shared_arguments(q, k, v, attention_call)
    dout = dout.contiguous()
    widest = WIDEST_BACKWARD if dlse is None else 0  # they take no dlse
    division = _divide(arguments, attention_call, widest)
    arguments["dout_ptr"] = dout
    if division.any_length:
        arguments["record_ptr"] = query_records(
            out, lse, dlse, division.blocks, attention_call.max_seqlen_q, arguments
        )
    dbias = torch.zeros(sum(heads) * q.shape[2], device=q.device) if wants_bias else nothing()
    if division.short:
        gradients = (dq, dk, dv)
        sums = attention_short.backward(
            gradients,
            lse,
            attention_call.bounds,
            attention_call.max_seqlen_q,
            wants_bias,
            arguments,
        )
        if sums is not None:
            dbias += sums.sum(0).flatten()
    if division.any_length:
        sums = _backward_any_length(q, dq, dk, dv, division, attention_call, wants_bias, arguments)
        if sums is not None:
            dbias += sums.sum(0).flatten()
    if not wants_relative_bias:
        return (*results, nothing(), dbias)
    drelative_bias = relative_bias_gradient(
        attention_call.relative_bias,
        attention_call.max_seqlen_q,
        attention_call.max_seqlen_k,
        batch=attention_call.cu_seqlens_q.shape[0] - 1,
        launch=relative_config(q.shape[2], precision_of(arguments)),
        **arguments,
    )
    return (*results, drelative_bias, dbias)


def _backward_any_length(
    q: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    division: _Division,
    attention_call: AttentionCall,
    wants_sums: bool,
    arguments: dict,
) -> Tensor | None:
    """Write dq, dk and dv.

    Returns: their sums over blocks of tokens, float32 (slots, 3, H, D), or None.
    """
    max_seqlen_q, max_seqlen_k = attention_call.max_seqlen_q, attention_call.max_seqlen_k
    batch = arguments["cu_seqlens_q_ptr"].shape[0] - 1
    gradients = {"dq_ptr": dq, "stride_dq": dq.stride(0), "sums_ptr": None}
    launch = dict(launch_of("backward_kv", max_seqlen_k, arguments))
    atomic = launch.pop("ATOMIC") and not torch.are_deterministic_algorithms_enabled()
    launch_q, wide_dq, finished = None, None, None
    if not atomic:
        launch_q = launch_of("backward_q", max_seqlen_q, arguments)
    else:
        wide_dq, finished = _zeroed_dq(q, batch * dk.shape[1])
    if wants_sums:
        block = min(launch["BLOCK_N"], launch_q["BLOCK_M"] if launch_q else launch["BLOCK_N"])
        shape = (q.shape[0] // block + batch, 3, *q.shape[1:])
        gradients["sums_ptr"] = torch.zeros(shape, dtype=torch.float32, device=q.device)
    of_grid, grid = block_grid(
        division.blocks, max_seqlen_k, launch["BLOCK_N"], arguments, arguments["GROUP"]
    )
    if 0 not in grid:
        run(
            attention_bwd_kv_kernel,
            grid,
            wide_dq_ptr=wide_dq,
            finished_ptr=finished,
            dk_ptr=dk,
            dv_ptr=dv,
            stride_dkv=dk.stride(0),
            **of_grid,
            **gradients,
            **arguments,
            **launch,
        )
    if launch_q:
        of_grid, grid = block_grid(division.blocks, max_seqlen_q, launch_q["BLOCK_M"], arguments)
        if 0 not in grid:
            run(attention_bwd_q_kernel, grid, **of_grid, **gradients, **arguments, **launch_q)
    return gradients["sums_ptr"]


def _zeroed_dq(q: Tensor, counts: int) -> tuple[Tensor, Tensor]:
    """(zeros for dq in float32, zeros for the counts of programs that have added to it), filled by one kernel."""
    size = q.numel()
    zeros = torch.zeros(size + counts, dtype=torch.float32, device=q.device)
    return zeros[:size], zeros[size:].view(torch.int32)
