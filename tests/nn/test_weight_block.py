"""Frozen weights in one block of memory."""

import io
import pickle

import pytest
import torch

import fastenc
from fastenc.models import Encoder, EncoderConfig
from fastenc.nn.ways import cpu_weights
from fastenc.ops import int8_products
from tests.helpers.checkpoints import packed, save
from tests.helpers.families import config, model, padded_batch
from tests.helpers.resident_memory import bytes_at_peak

pytestmark = pytest.mark.skipif(
    not cpu_weights.packed_is_faster(), reason="this processor has no vector kernels"
)


def weights_of(encoder):
    values = [value for layer in encoder.frozen._copies for value in layer.packed or layer.int8]
    return [value for value in values if isinstance(value, torch.Tensor)]


def test_the_weights_of_a_frozen_model_share_a_block(tmp_path):
    encoder = fastenc.freeze(Encoder.from_pretrained(save(model("bert"), tmp_path)))
    packed_weights = weights_of(encoder)
    assert len(packed_weights) == 4 * encoder.config.num_layers
    assert len({w.untyped_storage().data_ptr() for w in packed_weights}) == 1
    assert all(w.data_ptr() % 64 == packed_weights[0].data_ptr() % 64 for w in packed_weights)
    for layer, (weights, _) in zip(encoder.frozen._copies, encoder.layer_weights(), strict=True):
        for name, value in cpu_weights.pack(weights)._asdict().items():
            assert value is None or torch.equal(getattr(layer.packed, name), value)


needs_int8 = pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)


@needs_int8
def test_freezing_holds_one_copy_of_the_weights():
    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    encoder = Encoder(EncoderConfig.from_hf(config("bert", **sizes).to_dict())).eval()
    grown = bytes_at_peak(lambda: fastenc.freeze(encoder, dtype="int8"))
    held = sum(weight.nbytes for weight in weights_of(encoder))
    assert held > 25_000_000 and grown < 1.4 * held


@needs_int8
@pytest.mark.parametrize("form", ["pickle", "torch.save"])
def test_a_saved_model_has_each_weight_once(form, tmp_path):
    encoder = Encoder.from_pretrained(save(model("bert"), tmp_path), dtype="int8")
    file = io.BytesIO()
    if form == "pickle":
        pickle.dump(encoder, file)
    else:
        torch.save(encoder, file)
    size = sum(p.nbytes for p in (*encoder.parameters(), *weights_of(encoder)))
    assert file.tell() < size + 200_000  # names, descriptions and the vectors beside the weights
    file.seek(0)
    again = pickle.load(file) if form == "pickle" else torch.load(file, weights_only=False)
    assert len({w.untyped_storage().data_ptr() for w in weights_of(again)}) == 1
    batch = packed(padded_batch("bert"))
    with torch.no_grad():
        expected, ours = (m(batch).last_hidden_state for m in (encoder, again))
    assert torch.equal(ours, expected)
