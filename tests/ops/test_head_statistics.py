"""Head statistics: the reference and the C++ kernel against probabilities computed with numpy."""

import numpy as np
import pytest
import torch

from fastenc.ops import head_statistics
from tests.helpers.extension import needs_cpp
from tests.helpers.head_statistics import (
    LENGTHS,
    NAMES,
    SEEN,
    by_numpy,
    check_against_plain,
    inputs,
    offsets,
)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("skip_ends", [False, True])
def test_the_reference_is_numpys(lengths, skip_ends):
    q, k, targets = inputs(lengths, 3, 8, torch.float64)
    statistics = head_statistics(
        q, k, offsets(lengths), max(lengths), targets=targets, skip_ends=skip_ends
    )
    truth = by_numpy(q, k, lengths, targets, skip_ends)
    for name in (*NAMES, "strongest"):
        np.testing.assert_allclose(getattr(statistics, name), truth[name], atol=1e-12, err_msg=name)


@needs_cpp
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("head_dim", [16, 32, 128])
def test_values_keep_the_budget(instruction_set, lengths, head_dim):
    for dtype in (torch.float32, torch.bfloat16):
        check_against_plain(lengths, 3, head_dim, dtype, "cpp")
    check_against_plain(lengths, 2, head_dim, torch.float32, "cpp", skip_ends=True)


@pytest.mark.parametrize("window_size, radius", SEEN)
@pytest.mark.parametrize("skip_ends", [False, True])
def test_the_reference_is_numpys_with_windows_and_biases(window_size, radius, skip_ends):
    lengths = [5, 17, 1, 90]
    q, k, targets = inputs(lengths, 3, 8, torch.float64)
    table = None if radius is None else torch.randn(3, 2 * radius + 1, dtype=torch.float64)
    seen = {"window_size": window_size, "relative_bias": table}
    statistics = head_statistics(
        q, k, offsets(lengths), 90, targets=targets, skip_ends=skip_ends, **seen
    )
    truth = by_numpy(q, k, lengths, targets, skip_ends, **seen)
    for name in (*NAMES, "strongest"):
        np.testing.assert_allclose(getattr(statistics, name), truth[name], atol=1e-12, err_msg=name)


@needs_cpp
@pytest.mark.parametrize("window_size, radius", SEEN)
@pytest.mark.parametrize("skip_ends", [False, True])
def test_windows_and_biases_keep_the_budget(instruction_set, window_size, radius, skip_ends):
    for lengths, dtype in (([5, 17, 1, 64], torch.bfloat16), ([0, 230, 0, 33], torch.float32)):
        check_against_plain(lengths, 2, 32, dtype, "cpp", "cpu", skip_ends, window_size, radius)


@needs_cpp
def test_extreme_scores_have_exact_limits(instruction_set):
    """Equal scores: the entropy is the logarithm of the length. One score far above the others: the entropy is 0."""
    q, k = torch.zeros(40, 1, 16), torch.randn(40, 1, 16)
    statistics = head_statistics(q, k, offsets([40]), 40)
    torch.testing.assert_close(statistics.entropy, torch.full((40, 1), float(np.log(40))))
    assert statistics.strongest.eq(0).all(), "of equals the first"
    assert statistics.target.eq(0).all(), "no target was given"
    q, k = torch.full((20, 1, 16), 50.0), torch.zeros(20, 1, 16)
    k[13] = 50.0
    statistics = head_statistics(q, k, offsets([20]), 20)
    assert statistics.entropy.abs().max() == 0 and statistics.strongest.eq(13).all()
    torch.testing.assert_close(statistics.distance[:, 0], (torch.arange(20) - 13).abs().float())


@needs_cpp
def test_a_nan_stays_in_its_sequence():
    q, k, _ = inputs([9, 20, 5], 2, 32, torch.float32)
    clean = head_statistics(q, k, offsets([9, 20, 5]), 20)
    q = q.clone()
    q[12, 1] = torch.nan
    statistics = head_statistics(q, k, offsets([9, 20, 5]), 20)
    assert statistics.entropy[12, 1].isnan() and statistics.entropy.isnan().sum() == 1
    others = torch.ones(34, dtype=torch.bool)
    others[12] = False
    for one, other in zip(clean, statistics, strict=True):
        assert torch.equal(one[others], other[others])


@needs_cpp
def test_number_of_threads_changes_nothing():
    q, k, targets = inputs([30, 7, 64, 1, 12], 4, 32, torch.float32)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(head_statistics(q, k, offsets([30, 7, 64, 1, 12]), 64, targets=targets))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_cpp
def test_opcheck_and_compile():
    q, k, targets = inputs([5, 9], 2, 16, torch.float32)
    arguments = (q, k, offsets([5, 9]), targets, torch.randn(2, 7), 9, 0.25, 3, -1, True)
    torch.library.opcheck(torch.ops.fastenc.head_statistics.default, arguments)
    compiled = torch.compile(head_statistics, backend="eager", fullgraph=True)
    for one, other in zip(
        compiled(q, k, offsets([5, 9]), 9), head_statistics(q, k, offsets([5, 9]), 9), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q": torch.zeros(5, 32)}, "q and k must be floating point of one dtype and shape"),
        ({"k": torch.zeros(5, 2, 8)}, r"torch.float32 \(5, 2, 16\) and torch.float32 \(5, 2, 8\)"),
        ({"targets": torch.zeros(5)}, r"targets must be int32 of shape \(5,\)"),
        (
            {"targets": torch.tensor([0, 1, 2, 1, 2], dtype=torch.int32)},
            r"position in its sequence of 2 tokens, or -1, got 2 for token 4",
        ),
        ({"max_seqlen": 2}, "max_seqlen must be at least the longest sequence"),
        ({"softmax_scale": 0.0}, "softmax_scale must be positive, got 0"),
        ({"window_size": (-2, 1)}, r"window_size must be \(left, right\), .* got \(-2, 1\)"),
        ({"relative_bias": torch.zeros(2, 4)}, r"shape \(2, 2 \* R \+ 1\), .* got .* \(2, 4\)"),
        ({"impl": "cuda"}, "it has no CUDA kernel"),
    ],
)
def test_bad_input(changes, message):
    q = torch.zeros(5, 2, 16)
    arguments = {"q": q, "k": q, "cu_seqlens": offsets([3, 2]), "max_seqlen": 3} | changes
    with pytest.raises(ValueError, match=message):
        head_statistics(**arguments)


@needs_cpp
def test_odd_head_dims_take_the_reference():
    q, k, _ = inputs([4, 3], 2, 10, torch.float32)
    head_statistics(q, k, offsets([4, 3]), 4)
    with pytest.raises(ValueError, match="a multiple of 16 up to 128, got 10"):
        head_statistics(q, k, offsets([4, 3]), 4, impl="cpp")
