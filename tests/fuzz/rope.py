"""Rotary angles of random settings are the same as transformers', or the settings are refused."""

import copy
import logging
from random import Random
from typing import Any

import torch
from transformers.models.gte.modeling_gte import GteRotaryEmbedding
from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding
from transformers.models.nomic_bert.modeling_nomic_bert import NomicBertRotaryEmbedding

from fastenc.models import EncoderConfig
from fastenc.nn.rotary import rotary_table
from tests.helpers.families import config

MODULES = {
    "gte": GteRotaryEmbedding,
    "nomic_bert": NomicBertRotaryEmbedding,
    "modernbert": ModernBertRotaryEmbedding,
}
LAYERS = ("full_attention", "sliding_attention")
OPTIONAL: dict[str, tuple[Any, ...]] = {
    "attention_factor": (0.7, 1.5, None),
    "beta_fast": (32.0, 8, 1.0, None),
    "beta_slow": (1.0, 2, None),
    "mscale": (0.5, 1.0, 0.0),
    "mscale_all_dim": (1.5, 0.0),
    "truncate": (False, False, True),
    "original_max_position_embeddings": (10, 16, 4096),
}
POSITIONS = 40


def rope(rng: Random) -> dict[str, Any]:
    """The rotary settings of one layer type."""
    rope_type = rng.choice(("default", "linear", "dynamic", "yarn", "yarn", "yarn"))
    values: dict[str, Any] = {rng.choice(("rope_type", "rope_type", "type")): rope_type}
    if rope_type != "default":
        values["factor"] = rng.choice((1.0, 2.0, 3, 8.0))
    if rng.random() < 0.7:
        values["rope_theta"] = rng.choice((1000.0, 10_000, 160_000.0))
    if rope_type == "yarn":
        for name, choices in OPTIONAL.items():
            if rng.random() < 0.4:
                values[name] = rng.choice(choices)
    return values


def settings(family: str, rng: Random) -> dict[str, Any]:
    """The entries of a new or older config.json for the rotary angles."""
    values: dict[str, Any] = {}
    if rng.random() < 0.2:
        values["original_max_position_embeddings"] = rng.choice((8, 20))
    if rng.random() < 0.2:
        values["rope_theta"] = 5000.0
    if family != "modernbert":
        return {rng.choice(("rope_parameters", "rope_scaling")): rope(rng), **values}
    if rng.random() < 0.3:
        return {"rope_scaling": rope(rng), "global_rope_theta": 7000.0, **values}
    given: dict[str, Any] = {layer_type: rope(rng) for layer_type in LAYERS if rng.random() < 0.9}
    return {"rope_parameters": given, **values}


def check(rng: Random) -> None:
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    family = rng.choice(sorted(MODULES))
    given = settings(family, rng)
    config_class = type(config(family))
    sizes = {**config(family).to_dict(), "max_position_embeddings": POSITIONS}
    sizes.pop("rope_parameters")
    stored = {**sizes, **given}
    try:
        theirs = config_class.from_dict(copy.deepcopy(stored))
        module = MODULES[family](theirs)
    except Exception:  # transformers cannot build it
        return
    x, positions = torch.zeros(1), torch.arange(POSITIONS)[None]
    for values in (stored, theirs.to_dict()):  # what from_pretrained reads, and what patch reads
        ours = EncoderConfig.from_hf(values)
        for number in range(ours.num_layers):
            of_layer = (theirs.layer_types[number],) if family == "modernbert" else ()
            with torch.no_grad():
                cos, sin = module(x, positions, *of_layer)
            spec = ours.architecture.rotary(ours, number)
            assert spec is not None
            table = rotary_table(spec, POSITIONS, "cpu")
            half = cos.shape[-1] // 2
            expected = torch.cat([cos[0, :, :half], sin[0, :, :half]], 1)
            error = (table - expected).abs().max()
            assert error < 1e-5, f"{family} {given}: layer {number} differs by {error:.2g}"
