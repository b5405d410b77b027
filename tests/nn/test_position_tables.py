"""Position tables: one for each device, which is never replaced, and no warnings of a cache under torch.compile."""

import pytest
import torch

from fastenc.models import Encoder, EncoderConfig
from fastenc.nn.relative_bias import RelativeBiasSpec, distance_buckets
from fastenc.nn.rotary import RotarySpec, rotary_table
from fastenc.packing import pack_sequences
from tests.helpers.compiled import compiled_once


def test_a_device_has_one_table_and_keeps_it():
    """A CUDA graph reads the table that existed when it was recorded."""
    bias, angles = RelativeBiasSpec(), RotarySpec(8, 100.0)
    buckets, table = distance_buckets(bias, 128, "cpu"), rotary_table(angles, 16, "cpu")
    for positions in range(17, 60):
        rotary_table(angles, positions, "cpu")
        distance_buckets(RelativeBiasSpec(max_distance=positions), positions, "cpu")
    assert distance_buckets(RelativeBiasSpec(), 128, torch.device("cpu")) is buckets
    assert rotary_table(RotarySpec(8, 100.0), 16, "cpu").data_ptr() == table.data_ptr()
    assert rotary_table(angles, 37, "cpu").shape == (37, 8)


@pytest.mark.parametrize("family", ["mpnet", "modernbert"])
def test_encoders_with_a_table_compile_as_one_graph(family):
    parts = {"type_vocab_size": 0, "pooler": family == "mpnet"}
    encoder = Encoder(EncoderConfig(97, 32, 1, 2, 48, 40, family=family, **parts)).train()
    compiled = compiled_once(encoder, backend="eager")
    for lengths in ((3, 4), (20, 2, 5)):
        batch = pack_sequences([range(5, 5 + length) for length in lengths])
        assert compiled(batch).last_hidden_state.shape == (sum(lengths), 32)
