"""dropout(LayerNorm(word[id] + position[position_id + offset] + token_type[type])), forward and backward.

Forward: one program gathers the rows of ROWS tokens and writes y, tiled as in layer_norm.py; mean and rstd are kept.
Backward: a persistent grid gathers the rows again, writes dh and keeps the partial sums of dweight and dbias in
registers.

The gradient of a row of a table is the sum of dh over the tokens with that id (add_rows.py, index_sum.py).

Bytes per element, 2-byte types: forward 4 (word row, y), backward 6.
Source: Devlin et al. 2018, arXiv:1810.04805; Ba et al. 2016, arXiv:1607.06450.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from fastenc.kernels import layer_norm_config
from fastenc.kernels.device import persistent_programs
from fastenc.kernels.dropout import is_kept, load_rng, row_keys, spread, threshold_and_scale
from fastenc.kernels.launch import tunable
from fastenc.kernels.layer_norm_statistics import row_statistics
from fastenc.kernels.run import run
from torch import Tensor


@triton.jit
def _token_ids(
    ids_ptr,
    positions_ptr,
    types_ptr,
    row,
    inside,
    offset,
    HAS_POSITION: tl.constexpr,
    HAS_TYPE_IDS: tl.constexpr,
):
    """Rows of the three tables that the tokens take; int64, so their addresses are."""
    word = tl.load(ids_ptr + row, mask=inside, other=0)
    position = word * 0
    token_type = word * 0
    if HAS_POSITION:
        position = tl.load(positions_ptr + row, mask=inside, other=0) + offset
    if HAS_TYPE_IDS:
        token_type = tl.load(types_ptr + row, mask=inside, other=0)
    return word, position, token_type


@triton.jit
def _embed(
    word_ptr,
    position_ptr,
    type_ptr,
    taken,
    column,
    mask,
    WIDTH: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TYPE: tl.constexpr,
):
    """The sum of the tokens' rows, in float32; 0 where there is no element."""
    word, position, token_type = taken
    h = tl.load(word_ptr + word * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_TYPE:
        h += tl.load(type_ptr + token_type * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_POSITION:
        h += tl.load(position_ptr + position * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    return h


@triton.jit(do_not_specialize=["rows", "offset", "threshold"])
def _embedding_layer_norm_fwd_kernel(
    ids_ptr,  # (rows,), int64
    positions_ptr,  # (rows,), int64
    types_ptr,  # (rows,), int64
    word_ptr,  # (vocabulary, width)
    position_ptr,  # (positions, width)
    type_ptr,  # (types, width)
    weight_ptr,  # (width,)
    bias_ptr,  # (width,)
    y_ptr,  # (rows, width)
    mean_ptr,  # (rows,), float32
    rstd_ptr,  # (rows,), float32
    rng_ptr,  # (2,), int64: seed and offset
    rows,
    offset,
    eps,
    threshold,
    drop_scale,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TYPE: tl.constexpr,
    HAS_TYPE_IDS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    SAVE_STATISTICS: tl.constexpr,
):
    WHOLE: tl.constexpr = CHUNK * CHUNKS == WIDTH
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = row < rows
    taken = _token_ids(
        ids_ptr, positions_ptr, types_ptr, row, inside, offset, HAS_POSITION, HAS_TYPE_IDS
    )
    if HAS_DROPOUT:
        keys = row_keys(load_rng(rng_ptr), 0, row)
    row_chunks = ()
    sums = tl.zeros([ROWS, CHUNK], tl.float32)
    for c in tl.static_range(CHUNKS):
        column = (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
        mask = inside if WHOLE else inside & (column < WIDTH)
        h = _embed(
            word_ptr, position_ptr, type_ptr, taken, column, mask, WIDTH, HAS_POSITION, HAS_TYPE
        )
        sums += h
        row_chunks = row_chunks + (h,)  # noqa: RUF005
    mean, rstd = row_statistics(row_chunks, sums, eps, WIDTH, CHUNK, CHUNKS, False)
    for c in tl.static_range(CHUNKS):
        column = tl.zeros([ROWS, 1], tl.int32) + (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
        mask = inside if WHOLE else inside & (column < WIDTH)
        y = (row_chunks[c] - mean) * rstd
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_DROPOUT:
            y = tl.where(is_kept(keys, spread(column), threshold), y * drop_scale, 0.0)
        index = row.to(tl.int64) * WIDTH + column
        tl.store(y_ptr + index, y.to(y_ptr.dtype.element_ty), mask=mask)
    if SAVE_STATISTICS:
        tl.store(mean_ptr + row, mean, mask=inside)
        tl.store(rstd_ptr + row, rstd, mask=inside)


@triton.jit(do_not_specialize=["rows", "offset", "threshold"])
def _embedding_layer_norm_bwd_kernel(
    dy_ptr,  # (rows, width)
    ids_ptr,  # (rows,), int64
    positions_ptr,  # (rows,), int64
    types_ptr,  # (rows,), int64
    word_ptr,  # (vocabulary, width)
    position_ptr,  # (positions, width)
    type_ptr,  # (types, width)
    weight_ptr,  # (width,)
    mean_ptr,  # (rows,), float32
    rstd_ptr,  # (rows,), float32
    dh_ptr,  # (rows, width)
    partial_ptr,  # (programs, 2, width), float32: dweight, dbias
    rng_ptr,  # (2,), int64: seed and offset
    rows,
    offset,
    threshold,
    drop_scale,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TYPE: tl.constexpr,
    HAS_TYPE_IDS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    WANTS_AFFINE: tl.constexpr,
):
    WHOLE: tl.constexpr = CHUNK * CHUNKS == WIDTH
    dweights = ()
    dbiases = ()
    for _ in tl.static_range(CHUNKS):
        dweights = dweights + (tl.zeros([ROWS, CHUNK], tl.float32),)  # noqa: RUF005
        dbiases = dbiases + (tl.zeros([ROWS, CHUNK], tl.float32),)  # noqa: RUF005
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        inside = row < rows
        start = row.to(tl.int64) * WIDTH
        taken = _token_ids(
            ids_ptr, positions_ptr, types_ptr, row, inside, offset, HAS_POSITION, HAS_TYPE_IDS
        )
        if HAS_DROPOUT:
            keys = row_keys(load_rng(rng_ptr), 0, row)
        mean = tl.load(mean_ptr + row, mask=inside, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0)
        sum_g = tl.zeros([ROWS, CHUNK], tl.float32)
        sum_gx = tl.zeros([ROWS, CHUNK], tl.float32)
        xhats = ()
        gs = ()
        new_dweights = ()
        new_dbiases = ()
        for c in tl.static_range(CHUNKS):
            column = tl.zeros([ROWS, 1], tl.int32) + (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
            mask = inside if WHOLE else inside & (column < WIDTH)
            h = _embed(
                word_ptr, position_ptr, type_ptr, taken, column, mask, WIDTH, HAS_POSITION, HAS_TYPE
            )
            # 0 where there is no element, and so is what it adds to any sum.
            dy = tl.load(dy_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
            if HAS_DROPOUT:
                dy = tl.where(is_kept(keys, spread(column), threshold), dy * drop_scale, 0.0)
            xhat = (h - mean) * rstd
            g = dy
            if HAS_WEIGHT:
                g = dy * tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
            sum_g += g
            sum_gx += g * xhat
            xhats = xhats + (xhat,)  # noqa: RUF005
            gs = gs + (g,)  # noqa: RUF005
            new_dweights = new_dweights + (dweights[c] + dy * xhat,)  # noqa: RUF005
            new_dbiases = new_dbiases + (dbiases[c] + dy,)  # noqa: RUF005
        dweights = new_dweights
        dbiases = new_dbiases
        mean_g = tl.sum(sum_g, 1)[:, None] * (1.0 / WIDTH)
        mean_gx = tl.sum(sum_gx, 1)[:, None] * (1.0 / WIDTH)
        for c in tl.static_range(CHUNKS):
            column = (tl.arange(0, CHUNK) + c * CHUNK)[None, :]
            mask = inside if WHOLE else inside & (column < WIDTH)
            dh = (gs[c] - mean_g - xhats[c] * mean_gx) * rstd
            tl.store(dh_ptr + start + column, dh.to(dh_ptr.dtype.element_ty), mask=mask)
    if WANTS_AFFINE:
        for c in tl.static_range(CHUNKS):
            column = tl.arange(0, CHUNK) + c * CHUNK
            target = partial_ptr + tl.program_id(0).to(tl.int64) * (2 * WIDTH) + column
            tl.store(target, tl.sum(dweights[c], 0), mask=column < WIDTH)
            tl.store(target + WIDTH, tl.sum(dbiases[c], 0), mask=column < WIDTH)


@tunable("embedding_layer_norm", ROWS=(1, 2, 4, 8), num_warps=(2, 4, 8, 16))
def config(width: int, itemsize: int, backward: bool) -> dict:
    """Launch parameters of forward and backward where no table has better ones: those of layer_norm_config.py."""
    launch = layer_norm_config.config.rule(width, itemsize, backward)
    return {name: launch[name] for name in ("CHUNK", "CHUNKS", "ROWS", "num_warps")}


def compiled_keys() -> Iterator[dict]:
    """Keys of tuned entries; a test compiles the rule's launches for them ahead of time."""
    return (key for key in layer_norm_config.compiled_keys() if key["width"] <= 4096)


def launched(key: dict) -> Iterator[tuple[str, Any, dict]]:
    """(variant, kernel, constants) of the kernels that an entry with this key launches."""
    flags = {f"HAS_{name}": True for name in ("POSITION", "TYPE", "TYPE_IDS", "WEIGHT")}
    flags |= {"HAS_DROPOUT": key["dropout"], "WIDTH": key["width"]}
    chunk, count = layer_norm_config.chunks(key["width"], key["itemsize"])
    flags |= {"CHUNK": chunk, "CHUNKS": count}
    if key["backward"]:
        yield "", _embedding_layer_norm_bwd_kernel, {**flags, "WANTS_AFFINE": True}
    else:
        flags |= {"HAS_BIAS": True, "SAVE_STATISTICS": True}
        yield "", _embedding_layer_norm_fwd_kernel, flags


def embedding_layer_norm_forward(
    input_ids: Tensor,
    position_ids: Tensor | None,
    token_type_ids: Tensor | None,
    word: Tensor,
    position: Tensor | None,
    token_type: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
    position_offset: int,
    dropout_p: float,
    eps: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) as the op fastenc::embedding_layer_norm_fwd returns them."""
    rows, width = input_ids.numel(), word.shape[1]
    y = word.new_empty((*input_ids.shape, width))
    mean, rstd = (word.new_empty((rows if save else 0,), dtype=torch.float32) for _ in range(2))
    if not y.numel():
        return y, mean, rstd
    threshold, drop_scale = threshold_and_scale(dropout_p, rng_state)
    launch = config(width, word.element_size(), False, like=word, dropout=threshold > 0)
    some = lambda tensor: word if tensor is None else tensor.contiguous()
    run(
        _embedding_layer_norm_fwd_kernel,
        (triton.cdiv(rows, launch["ROWS"]),),
        input_ids.contiguous(),
        some(position_ids),
        some(token_type_ids),
        word.contiguous(),
        some(position),
        some(token_type),
        some(weight),
        some(bias),
        y,
        mean,
        rstd,
        some(rng_state),
        rows,
        position_offset,
        eps,
        threshold,
        drop_scale,
        WIDTH=width,
        HAS_POSITION=position is not None,
        HAS_TYPE=token_type is not None,
        HAS_TYPE_IDS=token_type_ids is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        HAS_DROPOUT=threshold > 0,
        SAVE_STATISTICS=save,
        **launch,
    )
    return y, mean, rstd


def embedding_layer_norm_backward(
    dy: Tensor,
    input_ids: Tensor,
    position_ids: Tensor | None,
    token_type_ids: Tensor | None,
    word: Tensor,
    position: Tensor | None,
    token_type: Tensor | None,
    weight: Tensor | None,
    rng_state: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    position_offset: int,
    dropout_p: float,
    wants_affine: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh, dweight, dbias) as the op fastenc::embedding_layer_norm_bwd returns them."""
    dy = dy.contiguous()
    rows, width = input_ids.numel(), word.shape[1]
    dh = torch.empty_like(dy)
    columns = width if wants_affine else 0
    if not dh.numel():
        dweight, dbias = (torch.zeros(columns, device=dy.device) for _ in range(2))
        return dh, dweight, dbias
    threshold, drop_scale = threshold_and_scale(dropout_p, rng_state)
    launch = config(width, word.element_size(), True, like=word, dropout=threshold > 0)
    # The number of programs sets the order of the sums. It depends on the shape and the kind of device alone.
    programs = min(
        persistent_programs(dy.device, layer_norm_config.backward_programs(width)),
        triton.cdiv(rows, launch["ROWS"]),
    )
    partial = torch.empty((programs, 2, columns), dtype=torch.float32, device=dy.device)
    some = lambda tensor: word if tensor is None else tensor.contiguous()
    run(
        _embedding_layer_norm_bwd_kernel,
        (programs,),
        dy,
        input_ids.contiguous(),
        some(position_ids),
        some(token_type_ids),
        word.contiguous(),
        some(position),
        some(token_type),
        some(weight),
        mean,
        rstd,
        dh,
        partial,
        some(rng_state),
        rows,
        position_offset,
        threshold,
        drop_scale,
        WIDTH=width,
        HAS_POSITION=position is not None,
        HAS_TYPE=token_type is not None,
        HAS_TYPE_IDS=token_type_ids is not None,
        HAS_WEIGHT=weight is not None,
        HAS_DROPOUT=threshold > 0,
        WANTS_AFFINE=wants_affine,
        **launch,
    )
    # Separate tensors: an op's results must not share memory.
    return dh, partial[:, 0].sum(0), partial[:, 1].sum(0)
