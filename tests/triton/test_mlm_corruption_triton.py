"""The Triton kernel behind fastenc.ops.mlm_corruption: on a GPU, or interpreted."""

import pytest
import torch

from fastenc.ops import mlm_corruption
from tests.helpers.mlm_corruption import tables


def on(device, tokens):
    return torch.randint(50, (tokens,)).to(device), *(table.to(device) for table in tables())


@pytest.mark.parametrize("tokens", [0, 1, 255, 2000])
@pytest.mark.parametrize("probability", [0.15, 0.9])
def test_equal_to_the_reference_to_the_bit(triton_target, tokens, probability):
    arguments = on(triton_target.device, tokens)
    for seed in (5, 2**62 + 7):
        seed = torch.tensor([seed], device=triton_target.device)
        ours, expected = (
            mlm_corruption(*arguments, 3, probability=probability, seed=seed, impl=impl)
            for impl in (triton_target.impl, "reference")
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    if tokens == 2000:
        corrupted, labels = ours
        fates = (corrupted == 3, corrupted == labels, (corrupted != 3) & (corrupted != labels))
        assert all((fate & (labels != -100)).any() for fate in fates)


def test_registration_passes_opcheck_and_compiles(triton_target):
    arguments = on(triton_target.device, 40)
    seed = torch.tensor([9], device=triton_target.device)
    corrupt = lambda: mlm_corruption(*arguments, 3, seed=seed, impl=triton_target.impl)
    compiled = torch.compile(corrupt, fullgraph=True, dynamic=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(corrupt(), compiled(), strict=True))
    ids, *rest = arguments
    torch.library.opcheck(torch.ops.fastenc.mlm_corruption.default, (ids, seed, *rest, 3, 2**31))


@pytest.mark.gpu
def test_captured_in_a_cuda_graph(triton_target):
    arguments = on(triton_target.device, 300)
    seed = torch.tensor([1], device=triton_target.device)
    corrupt = lambda: mlm_corruption(*arguments, 3, seed=seed, impl=triton_target.impl)
    corrupt()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = corrupt()
    seed.fill_(2)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, corrupt(), strict=True))
