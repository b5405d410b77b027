"""The rows of an embedding table, and its gradient."""

import pytest
import torch
import torch.nn.functional as F

from fastenc.ops.embedding import embedding
from tests.helpers.extension import needs_cpp

pytestmark = needs_cpp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_rows_and_gradient_are_pytorchs(dtype, padding_idx):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(7, (4, 9), generator=generator)
    table = torch.randn(7, 5, generator=generator).to(dtype).requires_grad_()
    dy = torch.randn(4, 9, 5, generator=generator).to(dtype)
    results = []
    for function in (embedding, F.embedding):
        y = function(ids, table, padding_idx)
        results.append((y, *torch.autograd.grad(y, table, dy)))
    (y, dtable), (expected, dexpected) = results
    assert torch.equal(y, expected)
    exact = torch.zeros(7, 5, dtype=torch.float64).index_add_(
        0, ids.flatten(), dy.double().view(-1, 5)
    )
    if padding_idx is not None:
        exact[padding_idx] = 0
    error = lambda gradient: float((gradient.double() - exact).norm())
    step = torch.finfo(dtype).eps / 2 * float(exact.norm())
    assert error(dtable) <= error(dexpected) + step
    assert dtable.dtype == dexpected.dtype and not dtable[padding_idx or 0].isnan().any()


def test_the_gradient_of_a_large_table_maps_few_pages_until_it_is_read():
    resource = pytest.importorskip("resource")
    table = torch.randn(20000, 512, requires_grad=True)  # 41 MB
    y = embedding(torch.tensor([7, 19999, 7]), table)
    faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    before = faults()
    y.backward(torch.ones(3, 512))
    assert faults() - before < table.nbytes // resource.getpagesize() // 2
    assert table.grad[[7, 19999, 8]].sum(1).tolist() == [1024, 512, 0]


def test_function_transforms_see_through_it():
    ids, table = torch.tensor([1, 0, 1]), torch.randn(3, 4)
    gradient = torch.func.grad(lambda t: embedding(ids, t).sum())(table.requires_grad_())
    assert gradient.sum(1).tolist() == [4, 8, 0]
