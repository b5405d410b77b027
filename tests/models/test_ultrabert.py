"""UltraBERT: the windows and rotary angles of its older files."""

import json

import pytest

from fastenc.models import Encoder, MaskedLM, SequenceClassifier
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.families import model, padded_batch


def as_older_file(folder, **values):
    path = folder / "config.json"
    written = json.loads(path.read_text())
    for key in ("layer_types", "rope_parameters"):
        written.pop(key)
    path.write_text(json.dumps(written | values))
    return folder


@pytest.mark.parametrize(
    "values",
    [
        dict(attention_windows=[3, 0, 3], rope_theta=[50.0, 1e4, 50.0]),
        dict(attention_windows=[0, None, 7]),
        dict(rope_theta=[50.0, 50.0, 1e4]),  # of the default types of layers
    ],
)
def test_an_older_file_gives_what_transformers_makes_of_it(values, tmp_path):
    theirs = model("ultrabert", **values)
    ours = Encoder.from_pretrained(as_older_file(save(theirs, tmp_path), **values))
    batch = padded_batch("ultrabert")
    expected = theirs(**batch).last_hidden_state[batch["attention_mask"].bool()]
    close(ours(packed(batch)).last_hidden_state, expected)


@pytest.mark.parametrize(
    "task,ours", [("ForMaskedLM", MaskedLM), ("ForSequenceClassification", SequenceClassifier)]
)
def test_what_config_json_lacks_is_transformers_default(task, ours, tmp_path):
    defaults = dict(num_key_value_heads=None, head_dim=None, sliding_window=128)
    defaults |= dict(prediction_head_size=768, max_position_embeddings=32768)
    theirs = model("ultrabert", task, **defaults)
    path = save(theirs, tmp_path) / "config.json"
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
    kept = (*sizes, "vocab_size", "model_type", "architectures")
    written = json.loads(path.read_text())
    path.write_text(json.dumps({key: written[key] for key in kept}))
    loaded = ours.from_pretrained(tmp_path)
    batch = padded_batch("ultrabert", lengths=(5, 200))
    expected = theirs(**batch).logits
    if task == "ForMaskedLM":
        expected = expected[batch["attention_mask"].bool()]
    close(loaded(packed(batch)).logits, expected)
    assert loaded.config.pad_token_id == theirs.config.pad_token_id


@pytest.mark.parametrize(
    "values,message",
    [
        (dict(attention_windows=8), "attention_windows must be a list of one value for each layer"),
        (dict(attention_windows=[8, 0]), "layer_types must have a name for each of the 3 layers"),
        (dict(attention_windows=["a", 0, 0]), "sliding_window must be an integer"),
        (dict(rope_theta=1e4), "rope_theta must be a list of one value for each layer"),
        (dict(rope_theta=[1e4, 1e4, "a"]), "rope_theta must be a finite number above 0"),
    ],
)
def test_a_malformed_older_file_is_an_error(values, message, tmp_path):
    folder = as_older_file(save(model("ultrabert"), tmp_path), **values)
    with pytest.raises(ValueError, match=message):
        Encoder.from_pretrained(folder)
