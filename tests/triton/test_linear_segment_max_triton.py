"""The Triton kernels behind fastenc.ops.linear_segment_max: on a GPU, or interpreted."""

import pytest

from tests.helpers.linear_segment_max import check_against_plain, check_ties_and_nan


@pytest.mark.parametrize(
    "lengths,width,vocabulary", [([5, 0, 70], 40, 130), ([1], 1, 1), ([3, 64], 64, 20)]
)
def test_values_and_gradients_keep_the_budget(triton_target, lengths, width, vocabulary):
    for dtype in triton_target.dtypes:
        check_against_plain(
            lengths, width, vocabulary, dtype, triton_target.impl, triton_target.device, width != 64
        )


def test_ties_and_nan(triton_target):
    check_ties_and_nan(triton_target.impl, triton_target.device)
