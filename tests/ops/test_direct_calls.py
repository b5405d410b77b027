"""Direct calls of the registered C++ ops, without Python's checks: an error names the op."""

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


def layer_attention(cu_seqlens):
    weight = torch.zeros(48, 16)
    inputs = (torch.zeros(6, 16), cu_seqlens, 3, None, None)
    options = (1, 1, 16, 1.0, None, None, 0.0, -1, -1)
    return torch.ops.fastenc.encoder_layer_attention(
        *inputs, False, [weight], None, False, *options
    )


def rotary(cu_seqlens):
    return torch.ops.fastenc.rotary(torch.zeros(6, 2, 16), torch.zeros(3, 16), cu_seqlens, 3, False)


def head_statistics(cu_seqlens):
    q, k = torch.zeros(2, 6, 2, 16)
    return torch.ops.fastenc.head_statistics(q, k, cu_seqlens, None, None, 3, 1.0, -1, -1, False)


OPS = {
    "attention": attention,
    "cross_attention": lambda cu_seqlens: attention(offsets(0, 3, 6), cu_seqlens),
    "encoder_layer_attention": layer_attention,
    "head_statistics": head_statistics,
    "rotary": rotary,
}
WRONG = {
    "from 0 to the number of tokens 6": offsets(0, 3, 5),
    "longer than max_seqlen 3, got 2 then 6 at index 2": offsets(0, 2, 6),
    "must be int32": torch.tensor([0, 3, 6]),
}


@needs_cpp
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("message", WRONG)
def test_wrong_offsets_are_refused_in_the_ops_name(op, message):
    OPS[op](offsets(0, 3, 6))
    with pytest.raises(RuntimeError, match=rf"\b{op}: .*{re.escape(message)}"):
        OPS[op](WRONG[message])
