"""Reading and writing model folders: config.json and safetensors, on disk or on a hub."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastenc._extras import require
from fastenc._files import write_atomically

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
HUB_FILES = [
    CONFIG,
    "*.safetensors",
    INDEX,
    "adapter_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.txt",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*/config.json",
]


def resolve(path_or_hub_id: str | Path) -> Path:
    """A local folder as it is; anything else is fetched from the Hugging Face hub (or its local cache).

    Raises: ValueError when it is neither.
    """
    folder = Path(path_or_hub_id)
    if folder.is_dir():
        return folder
    hub = require("huggingface_hub", extra="models")
    try:
        return Path(hub.snapshot_download(str(path_or_hub_id), allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's errors have no common class
        raise ValueError(
            f"{str(path_or_hub_id)!r} is not a folder here, and fetching it from the hub failed: {error}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Raises: ValueError for a missing or malformed config.json."""
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {CONFIG}: give a folder written by save_pretrained"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, in one safetensors file or in several with an index.

    Raises: ValueError for a missing, incomplete or corrupt file, or weights that exist only as pickles.
    """
    load_file = require("safetensors.torch", extra="models").load_file
    error_class = require("safetensors", extra="models").SafetensorError
    if (folder / WEIGHTS).exists():
        files = [folder / WEIGHTS]
    elif (folder / INDEX).exists():
        shards = json.loads((folder / INDEX).read_text())["weight_map"].values()
        files = [folder / name for name in sorted(set(shards))]
    else:
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        remedy = (
            f"it has {', '.join(pickled)}, a pickle that could run any code: convert it once with transformers, "
            "AutoModel.from_pretrained(...).save_pretrained(...)"
            if pickled
            else "give a folder written by save_pretrained"
        )
        raise ValueError(f"{folder} has no {WEIGHTS}: {remedy}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except FileNotFoundError:
            raise ValueError(
                f"the checkpoint is incomplete: {file} is named by {INDEX} but missing"
            ) from None
        except error_class as error:
            raise ValueError(
                f"{file} is corrupt or incomplete ({error}): download or write it again"
            ) from error
    return tensors


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write model.safetensors: the file is the old one or the new one at any moment."""
    save_file = require("safetensors.torch", extra="models").save_file
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(
        folder / WEIGHTS, lambda path: save_file(held, path, metadata={"format": "pt"})
    )


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, likewise."""
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    write_atomically(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
