"""Direct calls of the registered C++ ops, without Python's checks: an error names the op.

torch.compile skips the checks of values in Python, so that its graphs call the ops like this.
"""

import re

import pytest
import torch

import fastenc.ops.encoder_layer  # noqa: F401  (defines the ops of a layer)
from tests.helpers.extension import needs_cpp


def offsets(*values):
    return torch.tensor(values).int()


def attention(cu_seqlens, cu_seqlens_k=None, longest=3):
    qkv = torch.zeros(3, 6, 2, 16)
    optional = (None,) * 8
    return torch.ops.fastenc.attention_fwd(
        *qkv, cu_seqlens, cu_seqlens_k, *optional, longest, longest, 0.0, 1.0, -1, -1
    )


def layer_attention(cu_seqlens, relative_bias=None):
    weight = torch.zeros(48, 16)
    inputs = (torch.zeros(6, 16), cu_seqlens, 3, relative_bias, None)
    options = (1, 1, 16, 1.0, None, None, 0.0, -1, -1)
    return torch.ops.fastenc.encoder_layer_attention(
        *inputs, False, [weight], None, False, *options
    )


def rotary(cu_seqlens):
    return torch.ops.fastenc.rotary(torch.zeros(6, 2, 16), torch.zeros(3, 16), cu_seqlens, 3, False)


def head_statistics(cu_seqlens):
    q, k = torch.zeros(2, 6, 2, 16)
    return torch.ops.fastenc.head_statistics(q, k, cu_seqlens, None, None, 3, 1.0, -1, -1, False)


def segment_pool_gradient(cu_seqlens):
    dy, argmax = torch.zeros(2, 16), torch.zeros(0).int()
    return torch.ops.fastenc.segment_pool_bwd(dy, argmax, cu_seqlens, 6, 1)


def segments_of_products(op, *options):
    x, weight = torch.zeros(6, 16), torch.zeros(5, 16)
    return lambda cu_seqlens: op(x, weight, None, cu_seqlens, *options)


def segment_log_sum_gradient(cu_seqlens):
    logits, dsums = torch.zeros(6, 5), torch.zeros(2, 5)
    op = torch.ops.fastenc.linear_segment_log_sum_gradient_
    return op(logits, dsums, cu_seqlens, False)


EMISSIONS, SCORES = torch.zeros(6, 2), (torch.zeros(2), torch.zeros(2), torch.zeros(2, 2))
PATH = torch.tensor([0, 1, 1, 0, 1, 0])


def crf(cu_seqlens, tags=PATH, seqused=None):
    return torch.ops.fastenc.crf_fwd(EMISSIONS, tags, cu_seqlens, seqused, *SCORES)


def crf_gradient(cu_seqlens, tags=PATH, seqused=None):
    saved = (torch.ones(6, 16), torch.ones(6))
    arguments = (EMISSIONS, tags, cu_seqlens, seqused, *SCORES, *saved)
    return torch.ops.fastenc.crf_bwd(torch.ones(2), *arguments)


def crf_best_path(cu_seqlens, seqused=None):
    return torch.ops.fastenc.crf_viterbi(EMISSIONS, cu_seqlens, seqused, *SCORES)


BOUNDED = {
    "attention": attention,
    "cross_attention": lambda cu_seqlens: attention(offsets(0, 3, 6), cu_seqlens),
    "encoder_layer_attention": layer_attention,
    "head_statistics": head_statistics,
    "rotary": rotary,
}
UNBOUNDED = {
    "segment_pool": lambda cu: torch.ops.fastenc.segment_pool_fwd(torch.zeros(6, 16), cu, 1),
    "segment_pool, gradient": segment_pool_gradient,
    "linear_segment_max": segments_of_products(torch.ops.fastenc.linear_segment_max_fwd),
    "linear_segment_log_sum": segments_of_products(
        torch.ops.fastenc.linear_segment_log_sum_fwd, False
    ),
    "linear_segment_log_sum, gradient": segment_log_sum_gradient,
    "crf": crf,
    "crf, gradient": crf_gradient,
    "crf, best path": crf_best_path,
    "crf, best paths": lambda cu: torch.ops.fastenc.crf_nbest(EMISSIONS, cu, *SCORES, 2),
}
OPS = BOUNDED | UNBOUNDED
WRONG = {
    "from 0 to the number of tokens 6": offsets(0, 3, 5),
    "must not decrease": offsets(0, 7, 6),
    "must be int32": torch.tensor([0, 3, 6]),
}


def assert_refused(op, message, call):
    with pytest.raises(RuntimeError, match=rf"\b{op.split(',')[0]}: .*{re.escape(message)}"):
        call()


@needs_cpp
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("message", WRONG)
def test_wrong_offsets_are_refused_in_the_ops_name(op, message):
    OPS[op](offsets(0, 3, 6))
    assert_refused(op, message, lambda: OPS[op](WRONG[message]))


@needs_cpp
@pytest.mark.parametrize("op", BOUNDED)
def test_a_longer_sequence_than_max_seqlen_is_refused(op):
    message = "longer than max_seqlen 3, got 2 then 6 at index 2"
    assert_refused(op, message, lambda: OPS[op](offsets(0, 2, 6)))


@needs_cpp
@pytest.mark.parametrize("call", [crf, crf_gradient])
@pytest.mark.parametrize("tag", [-100, 2])
def test_a_crf_refuses_a_tag_that_it_does_not_have(call, tag):
    tags = PATH.clone()
    tags[4] = tag
    call(offsets(0, 3, 6), tags, offsets(3, 1))  # that token is not used
    message = f"tags must be in [0, 2), got {tag}"
    assert_refused("crf", message, lambda: call(offsets(0, 3, 6), tags, offsets(3, 2)))


@needs_cpp
@pytest.mark.parametrize(
    "call", [lambda *given: crf(given[0], PATH, given[1]), crf_best_path], ids=["forward", "best"]
)
@pytest.mark.parametrize("used", [-1, 4])
def test_a_crf_refuses_more_used_tokens_than_a_sequence_has(call, used):
    message = f"seqused must be from 0 to each sequence's length, got {used} of 3"
    assert_refused("crf", message, lambda: call(offsets(0, 3, 6), offsets(0, used)))


@needs_cpp
def test_a_layer_refuses_a_table_of_biases_without_a_middle():
    message = "relative_bias must be (num_heads, 2 * R + 1)"
    layer_attention(offsets(0, 3, 6), torch.zeros(1, 5))
    assert_refused(
        "encoder_layer_attention",
        message,
        lambda: layer_attention(offsets(0, 3, 6), torch.zeros(1, 4)),
    )
