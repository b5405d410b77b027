"""A wrong value in a configuration is refused by name; with any other value, the model loads and works.

A size that only config.json states allocates no memory.
"""

import json
import re
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from fastenc.models import Encoder
from tests.fuzz.checkpoints import CONFIG, sound
from tests.helpers.checkpoints import packed
from tests.helpers.families import ENCODERS, padded_batch

MEMORY = 2**34  # bytes of address space: an allocation of a size from config.json fails
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 5, 7, 64, 10**5, 10**9, 10**18, 2**63, 2**64, -(2**64), 10**400),
    *(0.0, 0.5, 1.0, -1.5, 1e-12, 1e300, 1e400, -1e400, float("nan")),
    *(None, True, False, "", "x", "gelu", "gelu_new", "gated-silu", "full_attention", "yarn"),
    *([], {}, [1, 2], ["full_attention"], ["x"] * 4, [[]], {"a": 1}, {"1": {}}, [None]),
)
# Keys of older files or of other formats.
MORE = (
    *("rope_parameters", "rope_scaling", "rope_theta", "layer_types", "local_attention"),
    *("relative_attention_num_buckets", "relative_attention_max_distance", "feed_forward_proj"),
    *("dense_act_fn", "is_gated_act", "pad_token_id", "classifier_dropout", "head_dim"),
    *("num_hidden_groups", "inner_group_num", "scale_embedding", "encoder_layerdrop"),
    *("id2label", "architectures", "task_options", "layer_mix", "partial_rotary_factor"),
)
ROPE = ("rope_type", "type", "rope_theta", "factor", "attention_factor", "beta_fast", "truncate")


def spoilt(values: dict[str, Any], rng: Random) -> tuple[str, ...]:
    """Change one value, or one inside a nested value; return the names that an error may give."""
    key = rng.choice(sorted({*values, *MORE}))
    if isinstance(values.get(key), dict) and values[key] and rng.random() < 0.8:
        return (key, *spoilt_inside(values[key], rng))
    if key.startswith("rope_") and rng.random() < 0.5:
        values[key] = {"rope_type": rng.choice(("yarn", "linear", "dynamic")), "factor": 2.0}
        return (key, *spoilt_inside(values[key], rng))
    values[key] = rng.choice(VALUES)
    return (key,)


def spoilt_inside(values: dict[str, Any], rng: Random) -> tuple[str, ...]:
    key = rng.choice(sorted({*values, *ROPE}))
    if isinstance(values.get(key), dict) and values[key]:
        return (key, *spoilt_inside(values[key], rng))
    values[key] = rng.choice(VALUES)
    return (key,)


def check(rng: Random) -> None:
    family = rng.choice(ENCODERS)

    def hidden(folder: Path) -> Tensor:
        loaded = Encoder.from_pretrained(folder)
        with torch.inference_mode():
            return loaded(packed(padded_batch(family))).last_hidden_state

    check_config(sound(family), rng, hidden, (53, 32))


def check_config(sound_folder: Path, rng: Random, run: Callable, shape: tuple[int, ...]) -> None:
    """``run`` loads a copy of the folder with one wrong value, and returns a result of the given shape."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name) / "model"
        shutil.copytree(sound_folder, folder)
        values = json.loads((folder / CONFIG).read_text())
        names = spoilt(values, rng)
        (folder / CONFIG).write_text(json.dumps(values))
        try:
            result = run(folder)
        except (ValueError, OSError) as error:
            # If sizes do not fit each other or the weights, the error names the file.
            known = (*names, CONFIG, "model.safetensors", "num_heads", "max_positions")
            model_type = values.get("model_type")
            assert any(each in str(error) for each in known), f"{model_type} {names}: {error}"
            assert len(str(error)) < 1500 and not re.search(r"\d{400}", str(error)), error
            return
    assert result.shape == shape, f"{values.get('model_type')} {names}: {tuple(result.shape)}"
