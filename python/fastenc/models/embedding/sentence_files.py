"""sentence-transformers' files beside the weights, which say how a text's vector is computed.

modules.json lists the steps: the encoder, a pooling (``1_Pooling/config.json``), optionally Dense modules (one with a
diagonal weight is a standardization of each dimension), and optionally a scaling to length 1. Pooling "last-four" is a
WeightedLayerPooling of the last four layers with equal weights, followed by a mean over tokens. A learned mix of layers
is a WeightedLayerPooling of all states. Its factor gamma is left out, because it does not change cosine similarities.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import member, write_atomically, write_text_atomically
from fastenc._base.json_values import JsonObject
from fastenc.models.architectures.values import COUNT, NOT_NEGATIVE, SWITCH, Rule, check
from fastenc.models.checkpoint import (
    SENTENCE_CONFIG,
    read_any_json,
    read_json,
    read_tensor_file,
    tokenizer_length,
)
from fastenc.models.config import EncoderConfig
from fastenc.models.embedding.dense import Dense
from fastenc.models.embedding.standardization import Standardization
from fastenc.nn.pooling import LAST_LAYERS, POOLINGS
from fastenc.nn.scalar_mix import ScalarMix
from fastenc.text.tokenizer_like import TokenizerLike
from fastenc.text.tokenizers import lowercasing_tokenizer

MODULES, TEXT, MAIN = "modules.json", "sentence_bert_config.json", SENTENCE_CONFIG
# Earlier names of TEXT, which sentence-transformers reads too.
OLD_TEXTS = tuple(
    f"sentence_{name}_config.json"
    for name in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Pooling → its name in the files of sentence-transformers' first versions, which all versions read.
FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "last-token": "pooling_mode_lasttoken",
}
# Pooling → its name in the files of newer versions.
NAMES = {"cls": "cls", "mean": "mean", "max": "max", "last-token": "lasttoken"}
LAYER_WEIGHTS = "layer_weights"
PROMPTS = Rule(
    "an object of texts",
    lambda value: isinstance(value, dict) and all(isinstance(each, str) for each in value.values()),
).or_none()


@dataclass(frozen=True)
class SentenceSettings:
    """How a text's vector is computed.

    Fields:
        pooling: "cls", "last-token", "mean", "max" or "last-four"; see :func:`fastenc.nn.pooling.pool_layers`.
        normalize: whether vectors are scaled to Euclidean length 1.
        max_length: number of tokens to which a text is cut, special tokens included; None: the model's positions.
        standardization: applied to the pooled vector before the scaling, or None.
        prompts: texts that may be put before each text, by name.
        include_prompt: whether the pooling reads the tokens of a prompt.
        dense: linear layers that are applied in place of a standardization. Training leaves them as they are.
        default_prompt: the name in ``prompts`` of the text that is put before each text if none is given, or None.
        similarity: how sentence-transformers compares vectors ("cosine", "dot", ...). fastenc only keeps it.
        truncate_dim: number of the vectors' first dimensions that are kept, or None.
    Raises: ValueError for another pooling, and for a standardization together with linear layers.
    """

    pooling: str = "mean"
    normalize: bool = True
    max_length: int | None = None
    standardization: Standardization | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    include_prompt: bool = True
    dense: tuple[Dense, ...] = ()
    default_prompt: str | None = None
    similarity: str = "cosine"
    truncate_dim: int | None = None

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {POOLINGS}, got {self.pooling!r}")
        if self.standardization is not None and self.dense:
            raise ValueError(
                f"a standardization takes the place of linear layers, got both, with {len(self.dense)} layers: leave "
                "one of them out"
            )

    def after_pooling(self, vectors: Tensor) -> Tensor:
        """The pooled vectors (..., output_size) after the standardization, or after the linear layers (..., width)."""
        if self.standardization is not None:
            return self.standardization(vectors)
        for dense in self.dense:
            vectors = dense(vectors)
        return vectors

    def width(self, pooled: int) -> int:
        """The width of a text's vector before ``truncate_dim``. Args: pooled: the width of the pooled vector."""
        return self.dense[-1].weight.shape[0] if self.dense else pooled

    def prompt_of(self, prompt: str | None, name: str | None) -> str:
        """What is put before each text: the prompt, the one with this name, the default one, or nothing.

        An empty prompt puts nothing before a text whatever the default.
        """
        if prompt is None and name is None:
            name = self.default_prompt
        if name is not None:
            if prompt is not None:
                raise ValueError(f"give prompt or prompt_name, got both: {prompt!r} and {name!r}")
            if name not in self.prompts:
                named = ", ".join(self.prompts) or "no prompts"
                raise ValueError(
                    f"prompt_name must name a prompt of the checkpoint, got {name!r}; it has {named}: give prompt"
                )
            prompt = self.prompts[name]
        if prompt and not self.include_prompt:
            raise ValueError(
                "this checkpoint pools a text without the tokens of its prompt, which fastenc does not compute, got "
                f"the prompt {prompt!r}: give prompt='', or use sentence-transformers"
            )
        return prompt or ""


def read_settings(folder: Path, config: EncoderConfig) -> SentenceSettings | None:
    """The settings in a folder, or None if it has no modules.json.

    The weights of a mix of layers are not read here, because the model's weights include them.

    Raises: ValueError for steps that this library does not compute.
    """
    if not (folder / MODULES).exists():
        return None
    modules = steps_in(folder / MODULES)
    module_types = [module_type for module_type, _ in modules]
    layers = module_types[1:2] == ["WeightedLayerPooling"]
    after = module_types[2 if layers else 1 :]
    where = {module_type: member(folder, path, folder / MODULES) for module_type, path in modules}
    linear = [member(folder, path, folder / MODULES) for name, path in modules if name == "Dense"]
    follow = after[1 : 1 + len(linear)] == ["Dense"] * len(linear)  # the pooling
    dense = _dense(linear, config.output_size) if follow else ()
    if dense:
        after = after[:1] + after[1 + len(dense) :]
    standardization = Standardization.of(dense[0]) if len(dense) == 1 else None
    if module_types[:1] != ["Transformer"] or after not in (["Pooling"], ["Pooling", "Normalize"]):
        raise ValueError(
            f"{folder / MODULES} must be Transformer, Pooling, optionally Dense modules of the text's vector, and "
            f"optionally Normalize, got {', '.join(module_types)}: use sentence-transformers for other steps. A Dense "
            f"module must have tanh or no activation. The first one must have {config.output_size} inputs"
        )
    values = json_in(where["Pooling"] / "config.json")
    pooling = _pooling(values)
    if layers and not config.layer_mix:
        file = where["WeightedLayerPooling"]
        equal = _equal_weights(file, config.num_layers)
        pooling = "last-four" if pooling == "mean" and equal else None
    if pooling is None:
        raise ValueError(
            f"{folder} must pool by one of {', '.join(POOLINGS)}, got {values} after {module_types[:-1]}: use "
            "sentence-transformers"
        )
    main = main_in(folder)
    settings = SentenceSettings(
        pooling,
        "Normalize" in module_types,
        max_length_in(folder),
        standardization,
        main.get("prompts") or {},
        values.get("include_prompt", True) is not False,
        () if standardization is not None else dense,
        main.get("default_prompt_name"),
        main.get("similarity_fn_name") or "cosine",
    )
    width = settings.width(config.output_size)
    kept = main.get("truncate_dim") or width
    return replace(settings, truncate_dim=kept if kept < width else None)


def main_in(folder: Path) -> dict[str, Any]:
    """What a folder's main file of sentence-transformers says; {} without one. Raises: ValueError for bad values."""
    main = json_in(folder / MAIN) if (folder / MAIN).exists() else {}
    check(main, {"prompts": PROMPTS}, f"{folder / MAIN}: ")
    prompts = main.get("prompts") or {}
    named = Rule("the name of one of the prompts", lambda value: value in prompts).or_none()
    rules = {"default_prompt_name": named, "truncate_dim": COUNT.or_none()}
    check(main, rules, f"{folder / MAIN}: ")
    return main


def _dense(folders: list[Path], width: int) -> tuple[Dense, ...]:
    """The linear layers in these folders, or none if one computes something else, or their widths do not fit.

    Args: width: the width of the first one's inputs.
    """
    found = [Dense.load(folder) for folder in folders]
    layers = tuple(layer for layer in found if layer is not None)
    widths = [width, *(layer.weight.shape[0] for layer in layers)]
    fit = all(
        layer.weight.shape[1] == before for layer, before in zip(layers, widths, strict=False)
    )
    return layers if len(layers) == len(found) and fit else ()


def write_settings(
    folder: Path, settings: SentenceSettings, config: EncoderConfig, mix: ScalarMix | None
) -> None:
    """Write the files into a model's folder. mix: the model's learned mix of layers, or None."""
    steps = ["Transformer", "Pooling"]
    if mix is not None or settings.pooling == "last-four":
        steps.insert(1, "WeightedLayerPooling")
        weights = torch.ones(LAST_LAYERS) if mix is None else mix.shares.detach().cpu()
        _write_layers(folder / "1_WeightedLayerPooling", config, weights)
    linear: tuple[Dense | Standardization, ...] = settings.dense
    if settings.standardization is not None:
        linear = (settings.standardization,)
    first = len(steps)
    steps += ["Dense"] * len(linear)
    if settings.normalize:
        steps.append("Normalize")
    paths = [f"{position}_{step}" if position else "" for position, step in enumerate(steps)]
    for path, layer in zip(paths[first:], linear, strict=False):
        layer.save(folder / path)
    flat = "mean" if settings.pooling == "last-four" else settings.pooling
    flags = {name: flat == pooling for pooling, name in FLAGS.items()}
    pooling = {
        "word_embedding_dimension": config.output_size,
        **flags,
        "include_prompt": settings.include_prompt,
    }
    for name, values in {
        f"{paths[steps.index('Pooling')]}/config.json": pooling,
        TEXT: {
            "max_seq_length": settings.max_length or config.max_positions,
            "do_lower_case": False,
        },
        MAIN: {
            "prompts": dict(settings.prompts),
            "default_prompt_name": settings.default_prompt,
            "similarity_fn_name": settings.similarity,
            "truncate_dim": settings.truncate_dim,
        },
        # Written last, so that a folder with modules.json is complete.
        MODULES: [
            {
                "idx": position,
                "name": str(position),
                "path": path,
                "type": f"sentence_transformers.models.{step}",
            }
            for position, (path, step) in enumerate(zip(paths, steps, strict=True))
        ],
    }.items():
        write_json(folder / name, values)


def steps_in(path: Path) -> list[tuple[str, str]]:
    """(name of the class, folder) of each step in a modules.json. Raises: ValueError for another content."""
    steps = read_any_json(path)
    try:
        steps = [(each["type"].rsplit(".", 1)[-1], each["path"]) for each in steps]
    except (TypeError, KeyError, AttributeError):
        steps = [("", None)]
    if not all(isinstance(folder, str) for _, folder in steps):
        raise ValueError(
            f"{path} must be a list of steps, each with a type and a path: write the folder again"
        )
    return steps


def _pooling(values: JsonObject) -> str | None:
    """The pooling in the config.json of a Pooling module, or None if it is not implemented here."""
    if "pooling_mode" in values:
        named = values["pooling_mode"]
        modes, names = named if isinstance(named, list) else [named], NAMES
    else:
        modes = [key for key, value in values.items() if key.startswith("pooling_mode_") and value]
        names = FLAGS
    return next((pooling for pooling, name in names.items() if modes == [name]), None)


def max_length_in(folder: Path) -> int | None:
    """The largest number of tokens of a text; newer sentence-transformers have it in the tokenizer's file."""
    return int(_of_texts(folder).get("max_seq_length") or 0) or tokenizer_length(folder)


def lowercased(tokenizer: TokenizerLike | None, folder: Path) -> TokenizerLike | None:
    """The tokenizer; if the folder's files say that texts are lowercased, one that does so."""
    if tokenizer is None or not _of_texts(folder).get("do_lower_case"):
        return tokenizer
    return lowercasing_tokenizer(tokenizer)


def _of_texts(folder: Path) -> dict[str, Any]:
    """What a folder's files say of texts before they are tokens. Raises: ValueError for a malformed file."""
    found = [name for name in (TEXT, *OLD_TEXTS) if (folder / name).exists()]
    values = json_in(folder / found[0]) if found else {}
    rules = {"max_seq_length": NOT_NEGATIVE.or_none(), "do_lower_case": SWITCH.or_none()}
    check(values, rules, f"{folder / found[0]}: " if found else "")
    return values


def _equal_weights(folder: Path, num_layers: int) -> bool:
    """Whether a folder's WeightedLayerPooling is the mean of the last four layers."""
    weights = read_tensor_file(folder / "model.safetensors").get(LAYER_WEIGHTS)
    if weights is None or weights.shape != (LAST_LAYERS,):
        return False
    start = json_in(folder / "config.json").get("layer_start")
    return start == num_layers + 1 - LAST_LAYERS and bool((weights == weights[0]).all())


def _write_layers(folder: Path, config: EncoderConfig, weights: Tensor) -> None:
    save_file = require("safetensors.torch", extra="models").save_file
    values = {
        "word_embedding_dimension": config.hidden_size,
        "layer_start": config.num_layers + 1 - len(weights),  # the embeddings' output is number 0
        "num_hidden_layers": config.num_layers,
    }
    write_json(folder / "config.json", values)
    tensors = {LAYER_WEIGHTS: weights.float()}
    write_atomically(folder / "model.safetensors", lambda path: save_file(tensors, path))


def json_in(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises: ValueError for a missing or malformed file."""
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): write the folder again") from error


def write_json(path: Path, values: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, json.dumps(values, indent=2) + "\n")
