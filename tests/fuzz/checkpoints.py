"""A damaged checkpoint is refused with a ValueError that names the folder, or loads as its files say."""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fastenc.models import Encoder
from tests.helpers.families import FAMILIES, WHOLE, model, whole

WEIGHTS, CONFIG = "model.safetensors", "config.json"
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 3, 7, 10**5, 10**12, 0.5, 1e400, -1e-12),
    *(None, True, "", "gelu", "mish", [], {}, [1, 2]),
)


@cache
def sound(family: str, task: str = "Model") -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    (whole(family) if task == WHOLE else model(family)).save_pretrained(folder)
    return folder


def damage_config(folder: Path, rng: Random) -> None:
    file = folder / CONFIG
    values = json.loads(file.read_text())
    key = rng.choice(sorted(values))
    if rng.random() < 0.2:
        del values[key]
    else:
        values[key] = rng.choice(VALUES)
    file.write_text(json.dumps(values))


def damage_bytes(folder: Path, rng: Random) -> None:
    file = folder / rng.choice((WEIGHTS, CONFIG))
    data = bytearray(file.read_bytes())
    if rng.random() < 0.5:
        data = data[: rng.randrange(len(data))]
    # In the header a changed byte changes the meaning; elsewhere it only changes a weight.
    for _ in range(rng.randint(1, 4) if data else 0):
        data[rng.randrange(min(len(data), 4000))] = rng.randrange(256)
    file.write_bytes(data)


def damage_tensors(folder: Path, rng: Random) -> None:
    file = folder / WEIGHTS
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    way = rng.choice(("drop", "shape", "rename", "dtype", "more"))
    if way == "more":
        tensors["encoder.layer.7.output.dense.weight"] = torch.zeros(2, 2)
    else:
        tensor = tensors.pop(name)
        if way == "shape":
            tensors[name] = tensor.flatten()[: rng.randrange(tensor.numel() + 1)].clone()
        elif way == "rename":
            tensors[name + "_"] = tensor
        elif way == "dtype":
            tensors[name] = tensor.to(rng.choice((torch.int64, torch.float64, torch.float16)))
    save_file(tensors, file, {"format": "pt"})


def damage_index(folder: Path, rng: Random) -> None:
    (folder / WEIGHTS).rename(folder / "part.safetensors")
    names = list(load_file(folder / "part.safetensors"))
    target = rng.choice(("part.safetensors", "../part.safetensors", "/etc/passwd", "", None, 3))
    content = rng.choice(
        ({"weight_map": dict.fromkeys(names, target)}, {"weight_map": names}, {}, [], None)
    )
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(content))


DAMAGES = (damage_config, damage_bytes, damage_tensors, damage_index)


def check(rng: Random) -> None:
    family = rng.choice(FAMILIES)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name) / "model"
        shutil.copytree(sound(family), folder)
        rng.choice(DAMAGES)(folder, rng)
        try:
            loaded = Encoder.from_pretrained(folder)
        except ValueError as error:
            assert len(str(error)) > 20, error
            return
        written = json.loads((folder / CONFIG).read_text())
        layers = written.get("num_hidden_layers", written.get("n_layers"))
        if loaded.config.architecture.layers_path is not None:  # ALBERT's files do not show it
            assert loaded.config.num_layers == layers
