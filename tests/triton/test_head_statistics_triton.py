"""The Triton kernel behind fastenc.ops.head_statistics: on a GPU, or interpreted."""

import pytest
import torch

from fastenc.ops import head_statistics
from tests.helpers.head_statistics import SEEN, check_against_plain, inputs, offsets


@pytest.mark.parametrize("skip_ends", [False, True])
@pytest.mark.parametrize(
    "lengths, head_dim", [([1], 16), ([2, 1, 3], 32), ([0, 130, 0, 33], 32), ([65, 64], 80)]
)
def test_values_keep_the_budget(triton_target, lengths, head_dim, skip_ends):
    for dtype in triton_target.dtypes:
        check_against_plain(
            lengths, 2, head_dim, dtype, triton_target.impl, triton_target.device, skip_ends
        )


@pytest.mark.parametrize("window_size, radius", SEEN)
def test_windows_and_biases_keep_the_budget(triton_target, window_size, radius):
    for number, dtype in enumerate(triton_target.dtypes):
        check_against_plain(
            [0, 130, 1, 33],
            2,
            32,
            dtype,
            triton_target.impl,
            triton_target.device,
            number % 2 == 0,
            window_size,
            radius,
        )


def test_without_targets_and_without_tokens(triton_target):
    device, impl = triton_target.device, triton_target.impl
    q, k, _ = inputs([7, 70], 2, 32, torch.float32, device)
    statistics = head_statistics(q, k, offsets([7, 70], device), 70, impl=impl)
    assert statistics.target.eq(0).all()
    torch.library.opcheck(
        torch.ops.fastenc.head_statistics.default,
        (q, k, offsets([7, 70], device), None, None, 70, 0.2, -1, -1, False),
    )
    nothing = head_statistics(q[:0], k[:0], offsets([0], device), 0, impl=impl)
    assert nothing.entropy.shape == (0, 2)


def test_more_sequences_than_a_grids_later_axes_have(monkeypatch):
    """CUDA allows 65,535 programs on the second and on the third axis."""
    pytest.importorskip("triton")
    from fastenc.kernels import head_statistics as module

    grids = []
    monkeypatch.setattr(module, "run", lambda kernel, grid, *values, **named: grids.append(grid))
    q = torch.zeros(70_000, 2, 16)
    module.head_statistics(
        q, q, torch.arange(70_001, dtype=torch.int32), None, None, 1, 0.25, -1, -1, False
    )
    ((programs, *later),) = grids
    assert programs == 70_000
    assert all(n <= 65_535 for n in later)
