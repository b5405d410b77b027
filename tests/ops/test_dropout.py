"""Dropout masks: every implementation matches their definition, and they look random."""

import pytest
import torch

from benchmarks.studies.dropout_battery import WALKS, WEAK, battery, verdict
from fastenc import ops
from fastenc.reference.dropout import dropout_scales, hash_columns, row_keys
from tests.helpers.extension import needs_cpp
from tests.helpers.layer_norm import check_dropout_next_to_1

WORD = 2**32


def key_by_definition(seed, offset, stream, row):
    """Philox4x32-7 in Python's own integers."""
    counter, key = (0, row, stream, offset), [seed % WORD, seed // WORD % WORD]
    for _ in range(7):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = (
            second // WORD ^ counter[1] ^ key[0],
            second % WORD,
            first // WORD ^ counter[3] ^ key[1],
            first % WORD,
        )
        key = [(key[0] + 0x9E3779B9) % WORD, (key[1] + 0xBB67AE85) % WORD]
    return counter[:2]


def hash_by_definition(key, column):
    h = (key[0] ^ column * 0x9E3779B1 % WORD) * 0x85EBCA6B % WORD
    return (h ^ h >> 15 ^ key[1]) * 0xC2B2AE35 % WORD


@pytest.mark.parametrize("seed,offset,stream", [(0, 0, 0), (2**63 - 1, WORD - 1, 15), (-7, 4, 2)])
def test_the_reference_is_its_definition(seed, offset, stream):
    rows = torch.tensor([0, 1, 2**31, WORD - 1])
    hashes = hash_columns(
        row_keys(torch.tensor([seed, offset]), stream, rows), torch.tensor([0, 1, 767, 2**20])
    )
    for i, row in enumerate(rows.tolist()):
        key = key_by_definition(seed % 2**64, offset, stream, row)
        expected = [hash_by_definition(key, column) for column in (0, 1, 767, 2**20)]
        assert hashes[i].tolist() == expected


@needs_cpp
@pytest.mark.parametrize("width", [1, 15, 16, 37, 130, 1000])
def test_the_mask_is_the_same_on_every_instruction_set(instruction_set, width):
    x, rng_state = torch.ones(5, width), torch.tensor([2**40 + 3, 9])
    _, h, *_ = torch.ops.fastenc.layer_norm_fwd(
        x, torch.zeros_like(x), None, None, None, rng_state, 0.3, 1e-5, False, True
    )
    assert torch.equal(h, dropout_scales(rng_state, 0, torch.arange(5), width, 0.3))


@pytest.mark.parametrize("dropout_p", [1 - 2**-17, 1 - 2**-53])
def test_a_probability_next_to_1_keeps_one_element_in_65536(dropout_p):
    """A threshold rounded to 1 would divide by zero."""
    check_dropout_next_to_1(dropout_p, torch.device("cpu"))


def test_heads_have_masks_of_their_own():
    qkv = torch.randn(40, 3, 2, 16)
    offsets = torch.tensor([0, 40], dtype=torch.int32)
    qkv[:, :, 1] = qkv[:, :, 0]
    out = ops.attention(qkv, offsets, 40, dropout_p=0.5)
    assert not torch.allclose(out[:, 0], out[:, 1])


@pytest.mark.parametrize("walk", WALKS)
def test_masks_pass_the_battery(walk):
    worst, p = verdict(battery(WALKS[walk](hash_columns), 20))
    assert p > 1e-3, worst


@pytest.mark.parametrize("weak", ["arithmetic progression", "numbered rows, along rows"])
def test_the_battery_finds_weak_hashes_out(weak):
    """At this size; the battery finds the other weak hashes with 2^22 words."""
    assert verdict(battery(WEAK[weak](), 20))[1] < 1e-3
