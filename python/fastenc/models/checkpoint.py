"""Reads and writes model folders: config.json and safetensors, on disk or from the hub."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import member, write_atomically, write_text_atomically
from fastenc.models.architectures import ARCHITECTURES, normalize_config
from fastenc.models.architectures.values import NAMES, TABLE, TEXT, Rule, check

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HUB_FILES = [
    CONFIG,
    "*.safetensors",
    INDEX,
    ADAPTER_CONFIG,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "modules.json",
    "sentence_*_config.json",
    SENTENCE_CONFIG,
    "*/config.json",
    "sparse_linear.*",
    "colbert_linear.*",
]
# What config.json says of the model as a whole.
MODEL_RULES = {
    "model_type": TEXT,
    "architectures": NAMES,
    "id2label": Rule(
        "an object with a name for each number",
        lambda value: (
            isinstance(value, dict)
            and all(key.isdecimal() and isinstance(name, str | int) for key, name in value.items())
        ),
    ).or_none(),
    "problem_type": TEXT.or_none(),
    "task_options": TABLE,
}
# PEFT's task_type → transformers' class name without the family.
PEFT_TASKS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "FEATURE_EXTRACTION": "Model",
}


def resolve(path_or_hub_id: str | Path) -> Path:
    """The path of a local folder, or of a model from the Hugging Face hub, downloaded to its local cache.

    Raises: ValueError for a name that is neither a folder nor on the hub.
    """
    folder = Path(path_or_hub_id)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or len(folder.parts) > 2 or folder.parts[:1] == ("..",):
        raise ValueError(f"{str(path_or_hub_id)!r} is not a folder here: check the path")
    hub = require("huggingface_hub", extra="models")
    try:
        return Path(hub.snapshot_download(str(path_or_hub_id), allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's errors have no common class
        raise ValueError(
            f"{str(path_or_hub_id)!r} is not a folder here, and fetching it from the hub failed ({error}): check the "
            "path or name"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of a folder's config.json.

    If the folder has an adaptation that the PEFT library wrote without config.json, the contents are derived from the
    base model's. Names of the hub's remote code are converted to transformers' current names. The activation of a
    cross-encoder is where sentence-transformers' earlier versions have it.

    Raises: ValueError for a missing or malformed file.
    """
    path = folder / CONFIG
    if not path.exists() and (folder / ADAPTER_CONFIG).exists():
        return _adapted_config(folder)
    try:
        values = read_json(path)
    except FileNotFoundError:
        remedy = "give a folder written by save_pretrained"
        modules = folder / "modules.json"
        if modules.exists() and b"StaticEmbedding" in modules.read_bytes():
            remedy = (
                "it is a static model, not an encoder: load it with fastenc.analysis.StaticModel.load, or "
                "sentence-transformers"
            )
        elif modules.exists():
            remedy = (
                "its encoder is in a folder of its own, as the first sentence-transformers wrote it: save it again "
                "with SentenceTransformer(...).save_pretrained(...)"
            )
        raise ValueError(f"{folder} has no {CONFIG}: {remedy}") from None
    check(values, MODEL_RULES, f"{path}: ")
    return normalize_config(_with_activation(folder, values))


def _with_activation(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """config.json's values with the activation that a cross-encoder of newer sentence-transformers has in a file of its
    own, which counts for more than config.json. Readers of other settings there report a file that is malformed."""
    try:
        stored = read_json(folder / SENTENCE_CONFIG).get("activation_fn")
    except (OSError, ValueError):
        return values
    return (
        values if stored is None else {**values, "sentence_transformers": {"activation_fn": stored}}
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises: OSError for a file that cannot be read, ValueError for one that is malformed or holds no object.
    """
    values = read_any_json(path)
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} must hold a JSON object, got {type(values).__name__}: write it again"
        )
    return values


def read_any_json(path: Path) -> Any:
    """The contents of a JSON file. Raises: as :func:`read_json`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    # A number of too many digits is a ValueError, too many brackets are a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): write it again") from error


def tokenizer_length(folder: Path) -> int | None:
    """The longest text in tokens that a folder's tokenizer_config.json names (``model_max_length``), or None.

    transformers writes about 1e30 if there is no limit.
    """
    length = _tokenizer_settings(folder).get("model_max_length")
    return int(length) if isinstance(length, int | float) and 0 < length < 1e9 else None


def cuts_on_the_left(folder: Path) -> bool:
    """Whether a folder's tokenizer_config.json says that the begin of a text that is too long is left out."""
    return _tokenizer_settings(folder).get("truncation_side") == "left"


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_CONFIG
    values = read_any_json(path) if path.exists() else {}
    return values if isinstance(values, dict) else {}


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The contents of a folder's adapter_config.json. Raises: ValueError for a missing or malformed file."""
    try:
        values = read_json(folder / ADAPTER_CONFIG)
        values["peft_type"], values["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} does not describe an adaptation ({error}): write it again"
        ) from error
    return values


def read_adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's adapter_model.safetensors. Raises: ValueError for a missing or damaged file."""
    return read_tensor_file(folder / ADAPTER_WEIGHTS)


def read_tensor_file(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises: ValueError for a missing or damaged file."""
    load_file = require("safetensors.torch", extra="models").load_file
    error_class = require("safetensors", extra="models").SafetensorError
    try:
        return load_file(file)
    except (OSError, error_class) as error:
        raise ValueError(f"{file} is corrupt or missing ({error}): write it again") from error


def base_of(folder: Path) -> Path:
    """The folder of the base model of a folder's adaptation. Raises: ValueError if it cannot be found."""
    name = read_adapter_config(folder)["base_model_name_or_path"]
    try:
        return resolve(name)
    except ValueError as error:
        raise ValueError(
            f"{folder} holds an adaptation of {name}, which cannot be loaded ({error}): put it there, or correct "
            f"base_model_name_or_path in {ADAPTER_CONFIG}"
        ) from error


def _adapted_config(folder: Path) -> dict[str, Any]:
    """The base model's config.json, with the entries for the head that the adaptation's files have."""
    values = read_config(base_of(folder))
    task = PEFT_TASKS.get(read_adapter_config(folder).get("task_type") or "")
    architecture = ARCHITECTURES.get(values.get("model_type", ""))
    if task is None or architecture is None:
        return values
    held = [architecture.class_name(task)]
    ends = (".classifier.weight", ".classifier.out_proj.weight")
    heads = [value for key, value in read_adapter_tensors(folder).items() if key.endswith(ends)]
    if values.get("architectures") != held:  # the base model's entries are for another head
        for key in ("id2label", "problem_type", "task_options"):
            values.pop(key, None)
    known = len(values.get("id2label") or range(2))  # transformers does not write its default
    count = heads[0].shape[0] if heads else known
    if count != known:
        values["id2label"] = {str(i): f"LABEL_{i}" for i in range(count)}
        values["problem_type"] = None
    return {**values, "architectures": held}


def without_head(folder: Path) -> str:
    """The remedy in error messages about a head that does not fit: how to start from the encoder alone."""
    if (folder / ADAPTER_CONFIG).exists():
        return f"the model that it adapts, {read_adapter_config(folder)['base_model_name_or_path']}"
    return (
        'its encoder alone, which this writes: python -c "from fastenc import Encoder; '
        f"Encoder.from_pretrained('{folder}').save_pretrained('{folder}-encoder')\""
    )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Name → tensor of a checkpoint, from one safetensors file or from several with an index.

    Raises: ValueError for a missing, incomplete or corrupt file, or if there are only pickle files. PermissionError
        with the file if it may not be read.
    """
    load_file = require("safetensors.torch", extra="models").load_file
    error_class = require("safetensors", extra="models").SafetensorError
    if (folder / WEIGHTS).exists():
        files = [folder / WEIGHTS]
    elif (folder / INDEX).exists():
        files = _shards(folder)
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
    file_of: dict[str, Path] = {}
    for file in files:
        try:
            of_file = load_file(file)
        except FileNotFoundError:
            if file.exists():  # safetensors calls a file that may not be read missing
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file)) from None
            raise ValueError(
                f"the checkpoint is incomplete: {file} is named by {INDEX} but missing"
            ) from None
        except (OSError, error_class) as error:
            raise ValueError(
                f"{file} is corrupt or incomplete ({error}): download or write it again"
            ) from error
        for name in tensors.keys() & of_file.keys():
            if not same(tensors[name], of_file[name]):
                raise ValueError(
                    f"{name} must have one value, got different ones in {file_of[name]} and {file}: write the "
                    "checkpoint again"
                )
        tensors |= of_file
        file_of |= dict.fromkeys(of_file, file)
    return tensors


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of a checkpoint have the same dtype, shape and values."""
    return a.dtype == b.dtype and torch.equal(a, b)


def is_table(stored: Tensor, computed: Tensor) -> bool:
    """Whether a checkpoint's table has the computed values in [-1, 1], up to rounding."""
    same_shape = stored.shape == computed.shape
    step = torch.finfo(stored.dtype).eps
    return same_shape and torch.allclose(stored.float().cpu(), computed, rtol=0, atol=step)


def weights_file(folder: Path) -> Path:
    """The file that says where a checkpoint's weights are, for messages."""
    single = folder / WEIGHTS
    return single if single.exists() else folder / INDEX


def _shards(folder: Path) -> list[Path]:
    """The files that an index names. Raises: ValueError for a malformed index, or a file outside the folder."""
    index = folder / INDEX
    try:
        names = set(read_any_json(index)["weight_map"].values())
        files = [member(folder, name, index) for name in sorted(names)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is not an index of weights ({error!r}): write the checkpoint again"
        ) from error
    if folder in files:
        raise ValueError(f"{index} names no file for some weights: write the checkpoint again")
    return files


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write model.safetensors atomically."""
    save_file = require("safetensors.torch", extra="models").save_file
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(
        folder / WEIGHTS, lambda path: save_file(held, path, metadata={"format": "pt"})
    )


def write_config(folder: Path, config: Mapping[str, object]) -> None:
    """Write config.json atomically."""
    write_text_atomically(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


FLOATS = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def checked_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype of parameters. Raises: ValueError for a name or a dtype that there is not."""
    named = FLOATS.get(dtype) if isinstance(dtype, str) else dtype
    if named is None or named not in FLOATS.values():
        names = ", ".join(map(repr, FLOATS))
        raise ValueError(
            f"dtype must be one of {names} or 'int8', or a torch.dtype of these, got {dtype!r}: give one of them"
        )
    return named
