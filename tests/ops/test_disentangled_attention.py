import pytest
import torch

from fastenc.nn.relative_positions import RelativePositionSpec, distance_slots
from fastenc.ops import attention, disentangled_attention
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import EDGE_LENGTHS, offsets_of
from tests.helpers.disentangled_attention import TERMS, inputs_of, plain

IMPLS = ("reference",)
EVERY_IMPL = pytest.mark.parametrize("impl", IMPLS)


def gradients(out, inputs, dout):
    return torch.autograd.grad(out, inputs.leaves(), dout.to(out.dtype))


def check(inputs, dout, impl):
    exact = inputs.to(torch.float64)
    results = [
        (out, *gradients(out, given, dout))
        for out, given in (
            (disentangled_attention(**inputs.call(), impl=impl), inputs),
            (plain(inputs), inputs),
            (plain(exact), exact),
        )
    ]
    names = ["out", "dqkv", *("dtable" for _ in inputs.leaves()[1:])]
    for name, *values in zip(names, *results, strict=True):
        assert_within_budget(*values, name)


@EVERY_IMPL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("terms", TERMS)
def test_values_and_gradients_keep_the_budget_at_edge_lengths(terms, dtype, impl):
    torch.manual_seed(0)
    inputs = inputs_of(EDGE_LENGTHS, 2, 32, terms, dtype=dtype)
    check(inputs, torch.randn(sum(EDGE_LENGTHS), 2, 32), impl)


@EVERY_IMPL
@pytest.mark.parametrize(("buckets", "farthest"), [(0, 7), (0, 100), (64, 512), (2, 4)])
def test_rows_of_every_kind_of_distance(buckets, farthest, impl):
    torch.manual_seed(0)
    inputs = inputs_of((70, 0, 3, 33), 3, 16, "both", buckets, farthest)
    check(inputs, torch.randn(106, 3, 16), impl)


@EVERY_IMPL
def test_without_tables_it_is_attention_with_the_same_dropout(impl):
    torch.manual_seed(0)
    inputs, state = inputs_of((5, 60, 17), 3, 32, "none"), torch.tensor([3, 4])
    ours = disentangled_attention(**inputs.call(), dropout_p=0.3, rng_state=state, impl=impl)
    offsets = offsets_of(inputs.lengths)
    theirs = attention(inputs.qkv, offsets, 60, dropout_p=0.3, rng_state=state, impl="reference")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_slots_are_those_of_transformers():
    from transformers.models.deberta_v2 import modeling_deberta_v2 as theirs

    for buckets, farthest in ((256, 512), (32, 128), (8, 40), (2, 4)):
        x = torch.empty(1, 700, 1)
        rows = theirs.build_relative_position(x, x, buckets, farthest)[0]
        wanted = (rows + buckets).clamp(0, 2 * buckets - 1)
        slots = distance_slots(RelativePositionSpec(buckets, farthest), farthest)
        position = torch.arange(700)
        distance = (position - position[:, None]).clamp(-farthest, farthest) + farthest
        assert torch.equal(slots[distance].long(), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(6, 2, 16)}, r"qkv must be floating point of shape .* view the fused"),
        ({"slots": torch.zeros(4).int()}, r"slots must be int32 of shape \(2 \* R \+ 1,\).*\(4,\)"),
        ({"slots": torch.zeros(5)}, "slots must be int32 .* got torch.float32"),
        ({"slots": torch.full((5,), 16).int()}, r"slots must be in \[0, 16\).*got 16"),
        ({"position_keys": torch.zeros(9, 2, 16)}, "must have as many rows, got 9 and 16"),
        ({"position_keys": torch.zeros(16, 2, 8)}, r"must have shape \(rows, 2, 16\)"),
        ({"position_queries": torch.zeros(16, 2, 16).half()}, "qkv's dtype torch.float32, got"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"cu_seqlens": torch.tensor([0, 3, 7]).int()}, "cu_seqlens"),
    ],
    ids=str,
)
def test_errors(change, message):
    call = inputs_of((3, 3), 2, 16).call()
    with pytest.raises(ValueError, match=message):
        disentangled_attention(**call | change)
