"""Wrong values in a model's JSON files are refused by name. Large values that change no result are accepted."""

import copy
import json
from unittest.mock import Mock

import pytest
import torch

import fastenc
from fastenc.models import Encoder, EncoderConfig, SequenceClassifier
from fastenc.models.embedding.sentence_files import read_settings
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.extension import needs_cpp
from tests.helpers.families import model, padded_batch

WRONG = [
    ("modernbert", "rope_parameters", 3, "rope_parameters must be an object, or null, got 3"),
    ("modernbert", "layer_types", ["full_attention"], "a name for each of the 4 layers, got 1"),
    ("modernbert", "local_attention", None, "local_attention must be an integer .* got None"),
    ("modernbert", "max_position_embeddings", 2**64, "max_position_embeddings must be a positive"),
    ("nomic_bert", "rope_parameters", {"factor": "x"}, "factor must be a finite number"),
    ("t5", "feed_forward_proj", None, "feed_forward_proj must be a text, got None"),
    ("t5", "relative_attention_max_distance", 8, "more than a quarter .* got 8 and 32"),
    ("bert", "initializer_range", "x", "initializer_range must be a finite number .* got 'x'"),
    ("bert", "max_position_embeddings", 2**64, "max_position_embeddings must be a positive"),
    ("bert", "hidden_dropout_prob", None, r"hidden_dropout_prob must be in \[0, 1\), got None"),
    ("bert", "vocab_size", 10**15, r"word_embeddings.weight has shape \(97, 32\)"),
    ("bert", "id2label", [1], "id2label must be an object with a name for each number"),
    ("roberta", "pad_token_id", 900, "rows after the padding token's, .* got pad_token_id 900 and"),
    ("bert", "id2label", {"0": "a", "5": "b"}, r"number the labels from 0 .* got \[0, 5\]"),
    ("bert", "task_options", "x", "task_options must be an object"),
    ("albert", "num_hidden_layers", 10**9, "num_hidden_layers must be .* at most 1000"),
    ("albert", "num_hidden_groups", 10**9, "num_hidden_groups must be .* at most 1000"),
    ("bart", "scale_embedding", "yes", "scale_embedding must be true or false, got 'yes'"),
]


def changed(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.mark.parametrize("family, key, value, message", WRONG)
def test_a_wrong_value_is_named(family, key, value, message, tmp_path):
    folder = changed(save(model(family), tmp_path), **{key: value})
    with pytest.raises(ValueError, match=message):
        SequenceClassifier.from_pretrained(folder) if key == "id2label" else (
            Encoder.from_pretrained(folder)
        )


@pytest.mark.parametrize(
    "family, given, message",
    [
        (
            "modernbert",
            {"pooler": False},
            "type_vocab_size must be 0 .* 'modernbert', .* got 2: give",
        ),
        ("electra", {}, "pooler must be False .* 'electra', which has no pooler, got True: give"),
    ],
)
def test_parts_that_a_family_lacks_are_refused(family, given, message):
    """Its checkpoints have no name for them, so that the model could not be saved."""
    with pytest.raises(ValueError, match=message):
        Encoder(EncoderConfig(97, 32, 2, 2, 48, 40, family=family, **given))


def test_classes_may_have_numbers_as_names(tmp_path):
    """As transformers writes them for labels that were numbers."""
    theirs = model("bert", "ForSequenceClassification", id2label={0: 0, 1: 1})
    classifier = SequenceClassifier.from_pretrained(save(theirs, tmp_path))
    assert classifier.label_names == [str(name) for name in theirs.config.id2label.values()]
    classifier.save_pretrained(tmp_path / "again")
    again = type(theirs).from_pretrained(tmp_path / "again")
    assert again.config.id2label == {0: "0", 1: "1"}


def test_a_label_without_an_output_matters_to_a_classifier_alone(tmp_path):
    """transformers makes an output for each entry, so that there is none of the number 5."""
    theirs = model("bert", "ForSequenceClassification", id2label={0: "a", 5: "b"})
    assert theirs.num_labels == 2
    folder = save(theirs, tmp_path)
    Encoder.from_pretrained(folder)
    for options in ({}, {"label_names": ["a", "b"]}):
        with pytest.raises(ValueError, match="number the labels from 0 without gaps"):
            SequenceClassifier.from_pretrained(folder, **options)


def test_an_encoder_in_a_folder_of_its_own_is_named(tmp_path):
    """As sentence-transformers wrote it before it had its files in the root."""
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(ValueError, match=r"has no config\.json: its encoder is in a folder of its"):
        Encoder.from_pretrained(tmp_path)


@needs_cpp
@pytest.mark.parametrize(
    "family, changes",
    [
        ("t5", {"relative_attention_max_distance": 10**9}),
        ("umt5", {"relative_attention_max_distance": 2**62}),
        ("modernbert", {"max_position_embeddings": 10**18}),
        ("modernbert", {"local_attention": 2**62}),
        ("gte", {"max_position_embeddings": 10**18}),
    ],
    ids=str,
)
def test_a_large_value_takes_no_memory(family, changes, tmp_path):
    """transformers computes only the angles and buckets of a batch, however large the limits are."""
    theirs, batch = model(family, **changes), padded_batch(family)
    mask = batch["attention_mask"].bool()
    ours = Encoder.from_pretrained(save(theirs, tmp_path))
    patched = fastenc.patch(copy.deepcopy(theirs))
    with torch.no_grad():
        expected = theirs(**batch).last_hidden_state[mask]
        close(ours(packed(batch)).last_hidden_state, expected)
        close(patched(**batch).last_hidden_state[mask], expected)


@needs_cpp
def test_buckets_beyond_the_table_of_most_distances(monkeypatch):
    monkeypatch.setattr("fastenc.nn.relative_bias.MOST_DISTANCES", 4)
    theirs, batch = model("t5", relative_attention_max_distance=100), padded_batch("t5")
    ours = fastenc.patch(copy.deepcopy(theirs))
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        close(ours(**batch).last_hidden_state[mask], theirs(**batch).last_hidden_state[mask])


CONTENTS = {
    "brackets": "[" * 100_000,
    "digits": '{"a": ' + "9" * 5000 + "}",
    "a list": "[]",
    "a text": '"x"',
    "bytes": "\udcff",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "adapter_config.json"]
)
def test_odd_json_is_named(name, content, tmp_path):
    save(model("bert"), tmp_path)
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    if name == "model.safetensors.index.json":
        (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"{name}"):
        Encoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("content", [*CONTENTS.values(), "[[]]", '[{"type": 3}]', "[null]", "7"])
def test_odd_modules_are_named(content, tmp_path):
    (tmp_path / "modules.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"modules\.json"):
        read_settings(tmp_path, fastenc.models.EncoderConfig())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_folder_in_the_place_of_a_file(name, tmp_path):
    (save(model("bert"), tmp_path) / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises((ValueError, OSError), match=name):
        Encoder.from_pretrained(tmp_path)


def test_weights_that_may_not_be_read_are_named(tmp_path, monkeypatch):
    """safetensors raises FileNotFoundError then, also if the file is there."""
    save(model("bert"), tmp_path)
    monkeypatch.setattr("safetensors.torch.load_file", Mock(side_effect=FileNotFoundError))
    with pytest.raises(PermissionError, match=r"Permission denied: .*model\.safetensors"):
        Encoder.from_pretrained(tmp_path)
