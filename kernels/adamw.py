"""AdamW's step for many tensors in one launch, with copies of the parameters in a 2-byte type.

    m = m + (1 - beta1) (g - m),  v = v + (1 - beta2) (g^2 - v)
    p = p (1 - lr weight_decay) - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

Tiling: one program takes BLOCK elements of one tensor. A table on the device holds the tensors' addresses, and a second
one says which block of which tensor a program takes. Bytes per element: 28, and 2 for a copy, which spares the forward
its cast of 6. Source: Loshchilov and Hutter 2019, arXiv:1711.05101.
"""

import math

import torch
import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor

# Rows of the table of tensors: addresses, and the number of elements.
PARAMETER = tl.constexpr(0)
MEAN = tl.constexpr(1)
SQUARE = tl.constexpr(2)
STEP = tl.constexpr(3)
COPY = tl.constexpr(4)
SIZE = tl.constexpr(5)

COPY_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
COUNTED = 1024  # step counts of a program


@triton.jit
def _one_minus_power(log_base, exponent):
    """1 - base^exponent without the digits that the subtraction would lose where the power is near 1."""
    x = log_base * exponent
    series = 1.0 + x / 9.0
    for n in tl.static_range(8, 1, -1):
        series = 1.0 + x / n * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def _pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _load(pointer, mask, MASKED: tl.constexpr):
    return tl.load(pointer, mask=mask, other=0.0) if MASKED else tl.load(pointer)


@triton.jit
def _store(pointer, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer, value, mask=mask)
    else:
        tl.store(pointer, value)


@triton.jit
def _update(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    copy_ptr,
    has_copy,
    mask,
    lr,  # over 1 - beta1^t
    decay,
    rate1,
    rate2,
    root,  # of 1 - beta2^t
    eps,
    COPIES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A block; without a mask its memory is read and written as vectors."""
    g = _load(g_ptr, mask, MASKED)
    m = _load(m_ptr, mask, MASKED)
    v = _load(v_ptr, mask, MASKED)
    m += rate1 * (g - m)
    v += rate2 * (g * g - v)
    p = _load(p_ptr, mask, MASKED) * decay - lr * m / (tl.sqrt(v) / root + eps)
    _store(m_ptr, m, mask, MASKED)
    _store(v_ptr, v, mask, MASKED)
    _store(p_ptr, p, mask, MASKED)
    if has_copy:
        _store(copy_ptr, p.to(COPIES), mask, MASKED)


@triton.jit(do_not_specialize=["count", "first"])
def _adamw_kernel(
    tensors_ptr,  # int64 (6, count), the rows above
    gradients_ptr,  # int64 (count,), addresses
    blocks_ptr,  # int32 (blocks, 2): tensor, number of a block in it
    found_inf_ptr,  # float32, 1: change nothing; or None
    count,
    first,  # the first program's block
    lr,
    decay,  # 1 - lr weight_decay
    rate1,  # 1 - beta1
    rate2,
    log_beta1,
    log_beta2,
    eps,
    BLOCK: tl.constexpr,
    COPIES: tl.constexpr,  # the copies' type
    ALIGNED: tl.constexpr,
):
    block = blocks_ptr + 2 * (first + tl.program_id(0))
    tensor = tensors_ptr + tl.load(block)
    start = tl.load(block + 1).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    size = tl.load(tensor + SIZE * count)
    if found_inf_ptr is not None:
        size = tl.where(tl.load(found_inf_ptr) == 0.0, size, 0)
    p_ptr = _pointer(tl.load(tensor + PARAMETER * count), tl.float32, ALIGNED) + index
    g_ptr = _pointer(tl.load(gradients_ptr + tl.load(block)), tl.float32, ALIGNED) + index
    m_ptr = _pointer(tl.load(tensor + MEAN * count), tl.float32, ALIGNED) + index
    v_ptr = _pointer(tl.load(tensor + SQUARE * count), tl.float32, ALIGNED) + index
    copy = tl.load(tensor + COPY * count)
    copy_ptr = _pointer(copy, COPIES, ALIGNED) + index
    step = tl.load(tl.load(tensor + STEP * count).to(tl.pointer_type(tl.float32)))
    lr = lr / _one_minus_power(log_beta1, step)
    root = tl.sqrt(_one_minus_power(log_beta2, step))
    if start + BLOCK <= size:
        _update(
            p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, copy != 0, None,
            lr, decay, rate1, rate2, root, eps, COPIES, False,
        )  # fmt: skip
    else:
        _update(
            p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, copy != 0, index < size,
            lr, decay, rate1, rate2, root, eps, COPIES, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _adamw_count_kernel(
    tensors_ptr,  # int64 (6, count)
    found_inf_ptr,  # float32, or None
    count,
    BLOCK: tl.constexpr,
):
    """Adds 1 to every step count, but 0 in a step that changes nothing."""
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tensor < count
    addresses = tl.load(tensors_ptr + STEP * count + tensor, mask=mask, other=0)
    steps = addresses.to(tl.pointer_type(tl.float32))
    one = 1.0
    if found_inf_ptr is not None:
        one = tl.where(tl.load(found_inf_ptr) == 0.0, 1.0, 0.0)
    tl.store(steps, tl.load(steps, mask=mask, other=0.0) + one, mask=mask)


def config() -> dict:
    """Launch parameters; not tuned on a device yet. A thread has two vectors of 16 bytes of each tensor."""
    return {"BLOCK": 1024, "num_warps": 4}


def adamw_tables(
    addresses: list[tuple[int, ...]], sizes: list[int], like: Tensor
) -> tuple[Tensor, Tensor, list[int]]:
    """The tables on like's device, and the first block of each tensor and of the end.

    Args:
        addresses: for each tensor those of PARAMETER, MEAN, SQUARE, STEP and COPY, which is 0 without a copy.
        sizes: the numbers of elements.
    """
    counts = torch.tensor([triton.cdiv(size, config()["BLOCK"]) for size in sizes])
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    tensor = torch.arange(len(sizes)).repeat_interleave(counts)
    blocks = torch.stack((tensor, torch.arange(len(tensor)) - starts[tensor]), 1).int()
    rows = torch.tensor([(*each, size) for each, size in zip(addresses, sizes, strict=True)])
    return rows.T.contiguous().to(like.device), blocks.to(like.device), starts.tolist()


def adamw_count(tensors: Tensor, found_inf: Tensor | None) -> None:
    """Count a step of each tensor in the table, int64 (6, count)."""
    count = tensors.shape[1]
    grid = (triton.cdiv(count, COUNTED),)
    run(_adamw_count_kernel, grid, tensors, found_inf, count, BLOCK=COUNTED, num_warps=4)


def adamw_step(
    tensors: Tensor,
    gradients: Tensor,
    blocks: Tensor,
    found_inf: Tensor | None,
    first: int,
    programs: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    copies: torch.dtype,
    aligned: bool,
) -> None:
    """Update the tensors of the blocks [first, first + programs), after :func:`adamw_count`."""
    log = lambda beta: math.log(beta) if beta > 0 else -math.inf
    run(
        _adamw_kernel,
        (programs,),
        tensors,
        gradients,
        blocks,
        found_inf,
        tensors.shape[1],
        first,
        float(lr),
        1 - lr * weight_decay,
        1 - betas[0],
        1 - betas[1],
        log(betas[0]),
        log(betas[1]),
        float(eps),
        COPIES=COPY_DTYPES[copies],
        ALIGNED=aligned,
        **config(),
    )
