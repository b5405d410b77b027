"""x W^T + bias with operands in 8 bits that are measured at run time, in plain torch.

A weight is symmetric with a scale for each output; a row of x is affine with a range for each group of its columns:

    w = scale_w q_w, q_w in -127..127;    x = low + scale_x q_x, q_x in 0..255
    sum x w = scale_x scale_w sum(q_x q_w) + low scale_w sum(q_w)    of each group

No zero point is rounded. The sums of integers stay below 2^24, so they are exact in float32.
"""

import torch
from torch import Tensor

GROUP_UNIT, LARGEST_GROUP = 64, 384  # 255 * 127 * 384 < 2^24
SMALLEST_RANGE = 1e-35  # below it all values count as equal


def group_size(depth: int) -> int:
    """The number of columns that share a range: of the fewest equal groups that are multiples of 64, at most 384.

    The last group lacks columns where the depth is no multiple of 64.
    """
    units = -(-depth // GROUP_UNIT)
    return GROUP_UNIT * max(
        size for size in range(1, LARGEST_GROUP // GROUP_UNIT + 1) if units % size == 0
    )


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(q_w int8 (columns, depth), scale_w (columns,)) of a float32 weight (columns, depth)."""
    top = weight.abs().amax(1)
    inverse = torch.where(top > SMALLEST_RANGE, torch.full_like(top, 127) / top, 0)
    return (weight * inverse[:, None]).round().to(torch.int8), top / 127


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(q_x uint8 (rows, depth), scale_x and low (rows, groups, 2)) of finite float32 rows (rows, depth)."""
    quantised, ranges = [], []
    for part in x.split(group_size(x.shape[1]), 1):
        low = part.amin(1)
        width = part.amax(1) - low
        inverse = torch.where(width > SMALLEST_RANGE, torch.full_like(width, 255) / width, 0)
        quantised.append(((part - low[:, None]) * inverse[:, None]).round().to(torch.uint8))
        ranges.append(torch.stack((width / 255, low), 1))
    return torch.cat(quantised, 1), torch.stack(ranges, 1)


def int8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The product of quantised operands, (rows, columns).

    Args:
        x: finite float32 (rows, depth); weight: float32 (columns, depth); bias: (columns,).
        dtype: of the sums; float64 gives the true value of the product of the quantised operands.
    """
    (q_x, ranges), (q_w, scale_w) = quantise_rows(x), quantise_weight(weight)
    size = group_size(x.shape[1])
    y = torch.zeros(x.shape[0], weight.shape[0], dtype=dtype)
    if bias is not None:
        y += bias.to(dtype)
    parts = zip(q_x.split(size, 1), q_w.split(size, 1), ranges.to(dtype).unbind(1), strict=True)
    for part_x, part_w, terms in parts:
        sums = part_x.to(dtype) @ part_w.to(dtype).T
        of_low = part_w.to(dtype).sum(1) * scale_w.to(dtype)
        y += sums * terms[:, :1] * scale_w.to(dtype) + terms[:, 1:] * of_low
    return y
