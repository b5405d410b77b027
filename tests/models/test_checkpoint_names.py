"""A checkpoint with two names of one weight loads if their values are the same, and is refused otherwise."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastenc.models import Encoder
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.families import model, padded_batch

# Family → (a weight's name in transformers' file, another name of it).
ALIASES = {
    "bert": ("encoder.layer.1.output.dense.weight", "bert.encoder.layer.1.output.dense.weight"),
    "xlm-roberta": ("embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"),
    "distilbert": (
        "transformer.layer.0.ffn.lin1.bias",
        "distilbert.transformer.layer.0.ffn.lin1.bias",
    ),
    "modernbert": ("final_norm.weight", "model.final_norm.weight"),
    "nomic_bert": ("encoder.layers.1.mlp.fc2.weight", "layers.1.mlp.down_proj.weight"),
    "gte": ("encoder.layer.0.attention.o_proj.bias", "gte.layers.0.self_attn.o_proj.bias"),
    "t5": ("shared.weight", "encoder.embed_tokens.weight"),
    "bart": ("layers.0.fc1.weight", "model.encoder.layers.0.fc1.weight"),
}


@pytest.mark.parametrize("family", ALIASES)
@pytest.mark.parametrize("first", [False, True])
def test_two_names_of_one_weight(family, first, tmp_path):
    theirs, file = model(family), tmp_path / "model.safetensors"
    save(theirs, tmp_path)
    tensors, (name, other) = load_file(file), ALIASES[family]
    value = tensors.pop(name)
    names = (other, name) if first else (name, other)
    save_file({**tensors, **{key: value.clone() for key in names}}, file)
    batch = padded_batch(family)
    with torch.no_grad():
        hidden = Encoder.from_pretrained(tmp_path)(packed(batch)).last_hidden_state
        close(hidden, theirs(**batch).last_hidden_state[batch["attention_mask"].bool()])
    save_file({**tensors, names[0]: value, names[1]: value + 1}, file)
    with pytest.raises(ValueError, match="are the same weight of the model") as error:
        Encoder.from_pretrained(tmp_path)
    assert all(re.search(rf"\s{re.escape(key)}\s", str(error.value)) for key in names)


def test_one_name_in_two_files(tmp_path):
    save(model("bert"), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    tensors, name = load_file(tmp_path / "a.safetensors"), "embeddings.LayerNorm.bias"
    files = dict.fromkeys(tensors, "a.safetensors") | {name: "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file({name: tensors[name]}, tmp_path / "b.safetensors")
    Encoder.from_pretrained(tmp_path)
    save_file({name: tensors[name] + 1}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=rf"{name} must have one value.*a.safetensors.*b.safeten"):
        Encoder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("family", "stacked"),
    [
        ("nomic_bert", "encoder.layers.0.attn.Wqkv.weight"),
        ("gte", "encoder.layer.0.mlp.up_gate_proj.weight"),
    ],
)
def test_stacked_weights_that_cannot_be_divided(family, stacked, tmp_path):
    save(model(family), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {stacked: torch.zeros(7, 32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"must be \d stacked tensors .* got shape \(7, 32\)"):
        Encoder.from_pretrained(tmp_path)
