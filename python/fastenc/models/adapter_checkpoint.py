"""Files of an adaptation: the added weights and the head, without the encoder they belong to.

LoRA and prefixes are written and read as the PEFT library does (adapter_config.json, adapter_model.safetensors);
bottlenecks and prompts, for which it has no such format, under names of our own.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastenc._extras import require
from fastenc._files import write_atomically
from fastenc.data import load_tokenizer
from fastenc.models import checkpoint
from fastenc.models.adaptations import (
    LORA_TARGETS,
    Adaptation,
    Adapters,
    Lora,
    PrefixTuning,
    PromptTuning,
    add_adaptation,
    encoder_of,
    head_parameters,
    layers_of,
    parts_of,
)
from fastenc.models.families import FAMILIES
from fastenc.models.pretrained import Model, PretrainedModel
from fastenc.nn.adaptation import LowRank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TYPES = {Lora: "LORA", PrefixTuning: "PREFIX_TUNING", Adapters: "FASTENC_ADAPTERS"}
TYPES[PromptTuning] = "FASTENC_PROMPT"
PEFT_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
# What PEFT's LoRA can do beyond ours, and the value that means it does not.
UNSUPPORTED = {"bias": "none", "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}}


def is_adapted(model: PretrainedModel) -> bool:
    """Whether saving the model means saving an adaptation: one is in use, and not merged."""
    encoder = encoder_of(model)
    return encoder.adaptation is not None and not encoder.unmerged_weights


def load(cls: type[Model], folder: Path, *, dtype: torch.dtype, **options) -> Model:
    """The base model that a folder's adaptation belongs to, with it.

    Raises: ValueError when the base is not where it was.
    """
    values = read_config(folder)
    name = values["base_model_name_or_path"]
    try:
        base = checkpoint.resolve(name)
    except ValueError as error:
        raise ValueError(
            f"{folder} holds an adaptation of {name}, which cannot be loaded ({error}): put it there, or correct "
            f"base_model_name_or_path in {CONFIG}"
        ) from error
    own = folder if (folder / checkpoint.CONFIG).exists() else base
    # The head's description is the adaptation's own, its first values do not matter.
    model = cls._load(base, checkpoint.read_config(own), dtype, options)
    load_adaptation(model, folder)
    if (folder / "tokenizer.json").exists():
        model.tokenizer = load_tokenizer(folder)
    return model


def load_adaptation(model: PretrainedModel, folder: str | Path, name: str = "default") -> None:
    """Add the adaptation of a folder to a model and use it.

    Raises: ValueError for a file that is damaged, or of another model, and as ``add_adaptation``.
    """
    folder = Path(folder)
    values = read_config(folder)
    add_adaptation(model, adaptation_of(values, model, folder / CONFIG), name)
    read_weights(folder, model, name)


def write(folder: Path, model: PretrainedModel) -> None:
    """Write the adaptation in use and the head.

    Raises: ValueError when the model does not know which checkpoint its encoder came from.
    """
    encoder = encoder_of(model)
    name = encoder.adaptation
    assert name is not None
    if model.base is None:
        raise ValueError(
            "an adaptation is saved without the encoder it belongs to, which was not loaded from a checkpoint: "
            "save it before adding the adaptation, and load it from there"
        )
    adaptation = encoder.adaptations[name]
    values = {
        "peft_type": TYPES[type(adaptation)],
        "task_type": PEFT_TASKS.get(model.architecture),
        "base_model_name_or_path": model.base,
        "inference_mode": True,
        **_config(model, adaptation),
    }
    held = {
        key: torch.cat([part.detach().cpu() for part in parts], -1).contiguous()
        for key, parts in {**_added(model, name), **_head(model, name)}.items()
    }
    save_file = require("safetensors.torch", extra="models").save_file
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / WEIGHTS, lambda path: save_file(held, path, metadata={"format": "pt"})
    )
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    write_atomically(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of adapter_config.json. Raises: ValueError for a file that is not one."""
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        values["peft_type"], values["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / CONFIG} does not describe an adaptation ({error}): write it again"
        ) from error
    return values


def adaptation_of(values: dict[str, Any], model: PretrainedModel, where: Path) -> Adaptation:
    """The adaptation that adapter_config.json describes.

    Raises: ValueError for a kind, or an option of PEFT, that is not computed here.
    """
    kind = values["peft_type"]
    if kind == "LORA":
        for key, expected in UNSUPPORTED.items():
            if values.get(key, expected) != expected:
                raise ValueError(f"{where}: {key} must be {expected!r}, got {values[key]!r}")
        targets = _lora_targets(model, values["target_modules"], where)
        alpha, rank = float(values["lora_alpha"]), int(values["r"])
        # Rank-stabilised LoRA divides by the root of the rank.
        alpha = alpha * rank**0.5 if values.get("use_rslora") else alpha
        ordered = tuple(target for target in LORA_TARGETS if target in targets)
        return Lora(rank, alpha, ordered, float(values.get("lora_dropout", 0.0)))
    if kind == "PREFIX_TUNING" and not values.get("prefix_projection"):
        return PrefixTuning(values["num_virtual_tokens"])
    if kind == TYPES[Adapters]:
        return Adapters(values["size"])
    if kind == TYPES[PromptTuning]:
        return PromptTuning(values["length"])
    raise ValueError(
        f"{where}: peft_type must be one of {sorted(TYPES.values())} (prefixes without projection), got {kind!r}"
    )


@torch.no_grad()
def read_weights(folder: Path, model: PretrainedModel, name: str) -> None:
    """Put the file's values into the adaptation ``name`` and the head of a model that has them.

    Raises: ValueError for a file that is damaged, or of another model.
    """
    load_file = require("safetensors.torch", extra="models").load_file
    error_class = require("safetensors", extra="models").SafetensorError
    try:
        found = load_file(folder / WEIGHTS)
    except (OSError, error_class) as error:
        raise ValueError(
            f"{folder / WEIGHTS} is corrupt or missing ({error}): write it again"
        ) from error
    places, head = _added(model, name), _head(model, name)
    # A file of PEFT may hold no head: then the model keeps its own.
    if head.keys() & found.keys():
        places |= head
    if missing := places.keys() - found.keys():
        raise ValueError(f"{folder / WEIGHTS} lacks {min(missing)}: does it belong to this model?")
    for key, parts in places.items():
        widths = [part.shape[-1] for part in parts]
        expected = (*parts[0].shape[:-1], sum(widths))
        if found[key].shape != expected:
            raise ValueError(
                f"{folder / WEIGHTS}: {key} has shape {tuple(found[key].shape)}, the model's is {expected}: "
                "does it belong to this model?"
            )
        for part, value in zip(parts, found[key].split(widths, -1), strict=True):
            part.copy_(value)


def _config(model: PretrainedModel, adaptation: Adaptation) -> dict[str, Any]:
    if isinstance(adaptation, Lora):
        names = [name for name, target, _ in _lora_modules(model) if target in adaptation.targets]
        return {
            "r": adaptation.rank,
            "lora_alpha": adaptation.alpha,
            "lora_dropout": adaptation.dropout_p,
            "target_modules": names,
            "modules_to_save": _head_modules(model) or None,
            "bias": "none",
        }
    if isinstance(adaptation, PrefixTuning):
        config = model.config
        return {
            "num_virtual_tokens": adaptation.length,
            "num_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "token_dim": config.hidden_size,
            "encoder_hidden_size": config.hidden_size,
            "num_transformer_submodules": 1,
            "prefix_projection": False,
            "modules_to_save": _head_modules(model) or None,
        }
    return asdict(adaptation)


def _added(model: PretrainedModel, name: str) -> dict[str, list[Tensor]]:
    """Name in the file → where its values are in the model, side by side in the last dimension."""
    encoder = encoder_of(model)
    adaptation = encoder.adaptations[name]
    if isinstance(adaptation, PromptTuning):
        return {"prompt_embeddings": [encoder.prompts[name].detach()]}
    layers = [parts_of(layer, name) for layer in layers_of(encoder)]
    if isinstance(adaptation, PrefixTuning):
        prefixes = [parts.prefix for parts in layers if parts.prefix is not None]
        return {"prompt_embeddings": [prefix.detach().flatten(1) for prefix in prefixes]}
    if isinstance(adaptation, Adapters):
        return {
            f"layers.{number}.{key}": [parameter.detach()]
            for number, parts in enumerate(layers)
            for key, parameter in parts.named_parameters()
        }
    places = {}
    for module, target, layer in _lora_modules(model):
        if target in adaptation.targets:
            part = layers[layer].low_rank[LORA_TARGETS[target]]
            assert isinstance(part, LowRank)
            for letter, matrices in (("A", part.a), ("B", part.b)):
                key = f"base_model.model.{module}.lora_{letter}.weight"
                places[key] = [matrices[target].detach()]
    return places


def _head(model: PretrainedModel, name: str) -> dict[str, list[Tensor]]:
    """As :func:`_added`, of the head's parameters."""
    # PEFT wraps a model in one module more for LoRA than for a prefix.
    is_lora = isinstance(encoder_of(model).adaptations[name], Lora)
    prefix = "base_model.model." if is_lora else "base_model."
    theirs = model.family_names(with_prefix=True)
    return {
        prefix + theirs[ours][0]: [parameter.detach()]
        for ours, parameter in head_parameters(model).items()
    }


def _head_modules(model: PretrainedModel) -> list[str]:
    names = {name.split(".")[0] for name in model.head_names().values()}
    if any("pooler" in name for name in head_parameters(model)):
        names.add("pooler")
    return sorted(names)


def _lora_modules(model: PretrainedModel) -> list[tuple[str, str, int]]:
    """(transformers' name of the module, target, layer) of every linear layer, or third of q, k, v."""
    family = FAMILIES[model.config.family]
    names = family.names(model.config.num_layers)
    prefix = "" if model.architecture == "Model" else f"{family.prefix}."
    found = []
    for layer in range(model.config.num_layers):
        for linear in dict.fromkeys(LORA_TARGETS.values()):
            theirs = names[f"layers.{layer}.{linear}"]
            several = (theirs,) if isinstance(theirs, str) else theirs
            targets = [t for t in LORA_TARGETS if LORA_TARGETS[t] == linear]
            found += [(prefix + n, t, layer) for n, t in zip(several, targets, strict=True)]
    return found


def _lora_targets(model: PretrainedModel, wanted: Any, where: Path) -> set[str]:
    """The targets that PEFT's target_modules, a pattern or ends of names, mean in every layer.

    Raises: ValueError when they are not the same in all layers, or include a module that has no addition here.
    """
    matches = (
        (lambda name: re.fullmatch(wanted, name))
        if isinstance(wanted, str)
        else (lambda name: any(name == end or name.endswith(f".{end}") for end in wanted))
    )
    chosen = [(target, layer) for name, target, layer in _lora_modules(model) if matches(name)]
    targets = {target for target, _ in chosen}
    if not chosen or len(chosen) != len(targets) * model.config.num_layers:
        raise ValueError(
            f"{where}: target_modules must name the same linear layers in all {model.config.num_layers} layers, "
            f"got {wanted!r}"
        )
    return targets
