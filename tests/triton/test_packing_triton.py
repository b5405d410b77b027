"""The Triton kernel behind fastenc.ops.unpack and the gradient of fastenc.ops.pack: on a GPU, or interpreted."""

import torch

from fastenc import ops, packing
from tests.helpers.packing import check_both_ways


def test_both_ways_with_gradients(triton_target):
    for lengths, length, shape in (
        ([5, 1, 9], 9, (8,)),
        ([0, 3, 0], 4, (2, 5)),
        ([2, 1], 2, ()),
        ([0, 0], 3, (6,)),
        ([], 0, (6,)),
        ([33, 64, 1], 70, (300,)),  # two blocks of columns
    ):
        for dtype in triton_target.dtypes:
            check_both_ways(lengths, length, shape, dtype, triton_target.impl, triton_target.device)


def test_padding_anywhere(triton_target):
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]], device=triton_target.device)
    values = torch.randn(5, 3, device=triton_target.device)
    expected = torch.zeros(3, 4, 3, device=values.device).index_put((mask.bool(),), values)
    batch = packing.pack(mask, mask)
    assert torch.equal(ops.unpack(values, batch, impl=triton_target.impl), expected)
    expected[mask == 0] = float("-inf")
    y = ops.unpack(values, batch, float("-inf"), impl=triton_target.impl)
    assert torch.equal(y, expected)
