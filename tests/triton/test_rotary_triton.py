"""The Triton kernel behind fastenc.ops.rotary, alone and before attention: on a GPU, or interpreted."""

import pytest
import torch

from fastenc.ops import rotary
from tests.helpers.attention_cases import offsets_of
from tests.helpers.rotary import check_rotary, check_rotary_attention, plain, table_of


@pytest.mark.parametrize("dim,rotary_dim", [(64, 64), (64, 20), (24, 10), (7, 2)])
def test_values_and_gradient_keep_the_budget(triton_target, dim, rotary_dim):
    for dtype in triton_target.dtypes:
        check_rotary((1, 0, 70, 5), 2, dim, rotary_dim, dtype, *triton_target[1::-1])


@pytest.mark.parametrize("lengths", [(5, 0, 40), (3, 140)])
def test_attention_rotates_before_and_gradients_after(triton_target, lengths):
    for dtype in triton_target.dtypes:
        check_rotary_attention(lengths, 32, 20, dtype, *triton_target[1::-1])


def test_strides_and_no_tokens(triton_target):
    device, impl = triton_target.device, triton_target.impl
    table, cu_seqlens = table_of(12, 16, device), offsets_of((12, 8)).to(device)
    backwards = torch.randn(16, 4, 20).permute(2, 1, 0)
    for x in (torch.randn(20, 3, 4, 48)[:, 1, :, 8:24], backwards):
        y = rotary(x.to(device), table, cu_seqlens, 12, impl=impl)
        torch.testing.assert_close(y.cpu(), plain(x, table.cpu(), (12, 8)))
    empty = torch.zeros(0, 2, 16, device=device)
    assert rotary(empty, table, offsets_of((0,)).to(device), 0, impl=impl).shape == (0, 2, 16)
