"""The Triton kernels behind fastenc.ops.embedding_layer_norm: on a GPU, or interpreted."""

import pytest
import torch

from fastenc.ops import embedding_layer_norm
from tests.helpers.embedding_layer_norm import (
    check_budget,
    check_constant_rows,
    check_tied_budget,
    inputs,
)


# 200 tokens of one type cross three windows of the backward; the rows of 5 ids of 150 tokens end inside windows.
@pytest.mark.parametrize(
    "tokens,vocabulary,width", [(1, 7, 33), (64, 64, 16), (200, 9, 40), (150, 5, 384)]
)
def test_values_and_every_gradient_keep_the_budget(triton_target, tokens, vocabulary, width):
    for dtype in triton_target.dtypes:
        check_budget(dtype, triton_target.impl, tokens, vocabulary, width, triton_target.device)


def test_constant_rows_give_the_bias(triton_target):
    check_constant_rows(triton_target.impl, triton_target.device)


def test_dropout_mask_padding_and_gradients_are_the_references(triton_target):
    ids, tables = inputs(80, 6, 200, torch.float32, triton_target.device)
    dy = torch.randn(80, 200, device=triton_target.device)
    results = []
    for impl in (triton_target.impl, "reference"):
        torch.manual_seed(5)
        y = embedding_layer_norm(
            **ids, **tables, padding_idx=0, position_padding_idx=2, dropout_p=0.3, impl=impl
        )
        results.append((y, *torch.autograd.grad(y, list(tables.values()), dy)))
    assert not results[0][1][0].any() and not results[0][2][2].any()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_tied_decoder_one_table_and_no_tokens(triton_target):
    device, impl = triton_target.device, triton_target.impl
    for dtype in triton_target.dtypes:
        check_tied_budget(dtype, impl, device)
    ids, tables = inputs(100, 8, 48, torch.float32, device)
    word = tables["word"]
    alone = embedding_layer_norm(ids["input_ids"], word, impl=impl)
    assert alone.shape == (100, 48) and abs(alone.mean().item()) < 1e-6
    empty = embedding_layer_norm(ids["input_ids"][:0], word, tables["weight"], impl=impl)
    empty.sum().backward()
    assert empty.shape == (0, 48) and not word.grad.any() and not tables["weight"].grad.any()
