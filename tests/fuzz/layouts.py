"""Names of weights with the prefix, without it, and older names. One weight under two names must have one value."""

import re
import tempfile
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file

from fastenc.models import Encoder
from fastenc.models.architectures import ARCHITECTURES
from tests.fuzz.checkpoints import CONFIG, WEIGHTS, sound
from tests.helpers.families import FAMILIES

OLDER = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))


def other_names(name: str, prefix: str) -> list[str]:
    """The other names that a weight may have; transformers' file calls it ``name``."""
    names = [name]
    if prefix not in ("nomic_bert", "gte"):
        names += [name.replace(new, old) for new, old in OLDER if new in name]
    return names + [f"{prefix}.{each}" for each in names]


def check(rng: Random) -> None:
    family = rng.choice(FAMILIES)
    folder = sound(family)
    expected = Encoder.from_pretrained(folder)
    prefix = ARCHITECTURES[expected.config.family].prefix
    tensors: dict[str, torch.Tensor] = {}
    contradictions = []
    for name, value in load_file(folder / WEIGHTS).items():
        names = other_names(name, prefix)
        stored = rng.sample(names, rng.choice((1, 1, 2)))
        tensors |= {each: value.clone() for each in stored}
        if len(stored) == 2 and rng.random() < 0.02:
            tensors[rng.choice(stored)] += 1
            contradictions.append(stored)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as made:
        copy = Path(made)
        (copy / CONFIG).write_bytes((folder / CONFIG).read_bytes())
        save_file(dict(rng.sample(list(tensors.items()), len(tensors))), copy / WEIGHTS)
        try:
            loaded = Encoder.from_pretrained(copy)
        except ValueError as error:
            words = re.split(r"[\s,:]+", str(error))
            assert any({*pair} <= {*words} for pair in contradictions), error
            return
    assert not contradictions, f"{family}: loaded with {contradictions}"
    for name, value in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), f"{family}: {name} has other values"
