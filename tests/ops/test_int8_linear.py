"""Products in 8 bits beside their formula in plain torch."""

import pytest
import torch

from fastenc.ops.int8_products import has_int8_products, int8_linear, pack_int8
from fastenc.reference import int8_linear as reference
from fastenc.testing import assert_within_budget

pytestmark = pytest.mark.skipif(
    not has_int8_products(), reason="this processor does not multiply 8 bits"
)

# Rows of one tile, of several and of several blocks; groups of every number; depths and columns that fill no panel.
SHAPES = (
    (1, 384, 1152), (20, 384, 64), (97, 1536, 48), (33, 768, 400), (130, 448, 16), (7, 16, 16), (200, 400, 80),
    (3, 1024, 64), (0, 64, 64),
)  # fmt: skip


def operands(rows, depth, columns):
    x = torch.randn(rows, depth) * 4 * torch.rand(rows, 1) + torch.randn(rows, 1)
    return x, torch.randn(columns, depth) * 0.05, torch.randn(columns)


def unpacked(packed, depth, columns):
    """(q, scales, terms of low) of a packed weight, as the layout in csrc/int8_linear.h says."""
    size = reference.group_size(depth)
    groups = -(-depth // size)
    width = packed.shape[1] // (4 * (1 + groups) + groups * size)
    scales = packed[:, : 4 * width].contiguous().view(torch.float32).flatten()
    rest = packed[:, 4 * width :].unflatten(1, (groups, width * (4 + size)))
    of_low = rest[..., : 4 * width].contiguous().view(torch.float32).movedim(1, 0).flatten(1)
    lanes = {64: 16, 16: 8}[width]  # floats of a vector of AVX-512, and of AVX2
    q = rest[..., 4 * width :].unflatten(2, (size // 64, width // lanes, 16, lanes, 4))
    q = q.permute(0, 3, 5, 1, 2, 4, 6).flatten(3).flatten(0, 2)  # columns, then terms
    return q[:columns, :depth], scales[:columns], of_low[:, :columns]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_the_product_of_the_formula(shape, threads):
    x, weight, bias = operands(*shape)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        packed = pack_int8(weight)
        for added in (bias, None):
            y = int8_linear(x, packed, added, shape[2])
            plain = reference.int8_linear(x, weight, added)
            truth = reference.int8_linear(x, weight, added, torch.float64)
            assert_within_budget(y, plain, truth)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_integers_and_ranges_are_those_of_the_formula(shape):
    x, weight, _ = operands(*shape)
    x[0] = 3.0  # without a range
    q, ranges = torch.ops.fastenc.quantise_int8(x)
    expected, expected_ranges = reference.quantise_rows(x)
    assert torch.equal(q, expected) and torch.equal(ranges, expected_ranges)
    weight[0] = 0.0
    expected, scales = reference.quantise_weight(weight)
    q, packed_scales, of_low = unpacked(pack_int8(weight), *weight.shape[::-1])
    assert torch.equal(q, expected) and torch.equal(packed_scales, scales)
    parts = expected.split(reference.group_size(shape[1]), 1)
    for ours, part in zip(of_low, parts, strict=True):
        assert torch.equal(ours, part.sum(1).float() * scales)


@pytest.mark.parametrize(
    "depth, size",
    [(16, 64), (384, 384), (768, 384), (1024, 256), (3072, 384), (448, 64), (2624, 64)],
)
def test_groups_are_the_fewest_equal_ones(depth, size):
    assert reference.group_size(depth) == size
    units = -(-depth // 64)
    fewest = next(n for n in range(1, units + 1) if units % n == 0 and units // n <= 6)
    assert size == units // fewest * 64


def test_it_is_near_the_product_of_floats():
    x, weight, bias = operands(64, 768, 256)
    exact = x.double() @ weight.double().T + bias
    error = int8_linear(x, pack_int8(weight), bias, 256) - exact
    assert error.norm() < 0.01 * exact.norm()


def test_the_largest_sums_are_exact():
    x = torch.full((1, 384), 2.0)
    x[0, 0] = 0.0  # all the others are 255 steps above it
    weight = torch.full((16, 384), 0.3)
    y = int8_linear(x, pack_int8(weight), None, 16)
    scale_x, scale_w = torch.tensor(2.0) / 255, torch.tensor(0.3) / 127
    assert torch.equal(y, (255.0 * 127 * 383 * (scale_w * scale_x)).expand(1, 16))


@pytest.mark.parametrize("rows", [40, 300])
def test_rows_do_not_depend_on_those_beside_them(rows):
    x, weight, bias = operands(rows, 768, 192)
    packed = pack_int8(weight)
    whole = int8_linear(x, packed, bias, 192)
    order = torch.randperm(rows)
    assert torch.equal(int8_linear(x[order], packed, bias, 192), whole[order])
    assert torch.equal(int8_linear(x[5:6], packed, bias, 192), whole[5:6])
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    assert torch.equal(int8_linear(x, packed, bias, 192), whole)
    torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(value):
    x, weight, bias = operands(20, 768, 64)
    packed = pack_int8(weight)
    whole = int8_linear(x, packed, bias, 64)
    x[3, 700] = value
    y = int8_linear(x, packed, bias, 64)
    assert y[3].isnan().all()
    others = torch.arange(20) != 3
    assert torch.equal(y[others], whole[others])


def test_wrong_operands_are_refused():
    x, weight, _ = operands(4, 64, 32)
    with pytest.raises(RuntimeError, match=r"pack_int8: .*multiples of 16"):
        pack_int8(weight[:, :40])
    with pytest.raises(RuntimeError, match=r"pack_int8: .*float32"):
        pack_int8(weight.bfloat16())
    with pytest.raises(RuntimeError, match=r"int8_linear: a weight must be \(96, 64\)"):
        int8_linear(x, pack_int8(weight), None, 96)
    with pytest.raises(RuntimeError, match="int8_linear: x must be"):
        int8_linear(x.double(), pack_int8(weight), None, 32)


def test_opcheck():
    x, weight, bias = operands(4, 448, 80)
    packed = pack_int8(weight)
    for op, arguments in (
        (torch.ops.fastenc.pack_int8, ([weight],)),
        (torch.ops.fastenc.quantise_int8, (x,)),
        (torch.ops.fastenc.int8_linear, (x, packed, bias, 80)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
