"""What adapter_config.json says of an adaptation, in the words of the PEFT library."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastenc.models import checkpoint
from fastenc.models.adapters.adaptation_methods import (
    Adaptation,
    Adapters,
    Lora,
    PrefixTuning,
    PromptTuning,
    encoder_parts,
)
from fastenc.models.adapters.adaptation_state import ENCODER_PARTS
from fastenc.models.adapters.adaptations import encoder_of, head_parameters

if TYPE_CHECKING:
    from fastenc.models.pretrained import PretrainedModel

TYPES = {
    Lora: "LORA",
    PrefixTuning: "PREFIX_TUNING",
    Adapters: "FASTENC_ADAPTERS",
    PromptTuning: "FASTENC_PROMPT",
}
# Options of PEFT's LoRA that are not supported here → the value that switches them off.
UNSUPPORTED = {
    "bias": "none",
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
}
# Values of PEFT's init_lora_weights that keep the base model's weights. With others, such as "pissa", PEFT changes them
# when it loads the adaptation.
KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")


def adaptation_of(values: dict[str, Any], model: "PretrainedModel", where: Path) -> Adaptation:
    """The adaptation that adapter_config.json describes.

    Args: where: the file, for error messages.
    Raises: ValueError for a method or an option of PEFT that is not supported here.
    """
    peft_type = values["peft_type"]
    if peft_type == "LORA":
        for key, expected in UNSUPPORTED.items():
            if values.get(key, expected) != expected:
                raise ValueError(
                    f"{where}: {key} must be {expected!r}, got {values[key]!r}: use PEFT for this adaptation"
                )
        if (init := values.get("init_lora_weights", True)) not in KEEP_THE_BASE:
            raise ValueError(
                f"{where}: init_lora_weights must be one of {KEEP_THE_BASE}, because with others PEFT changes the base "
                f"model's weights, got {init!r}: use PEFT for this adaptation, or convert it to LoRA with PEFT"
            )
        targets = _lora_targets(model, values, where)
        alpha, rank = float(values["lora_alpha"]), int(values["r"])
        # Rank-stabilised LoRA divides by the root of the rank.
        alpha = alpha * rank**0.5 if values.get("use_rslora") else alpha
        return Lora(rank, alpha, targets, float(values.get("lora_dropout", 0.0)))
    if peft_type == "PREFIX_TUNING" and not values.get("prefix_projection"):
        return PrefixTuning(values["num_virtual_tokens"])
    if peft_type == TYPES[Adapters]:
        return Adapters(values["size"])
    if peft_type == TYPES[PromptTuning]:
        return PromptTuning(values["length"])
    raise ValueError(
        f"{where}: peft_type must be one of {sorted(TYPES.values())} (prefixes without projection), got {peft_type!r}"
    )


def adapter_config_of(
    model: "PretrainedModel", adaptation: Adaptation, base: str
) -> dict[str, Any]:
    """The contents of adapter_config.json.

    Args: base: folder or name of the base model.
    """
    tasks = {part: task for task, part in checkpoint.PEFT_TASKS.items()}
    return {
        "peft_type": TYPES[type(adaptation)],
        "task_type": tasks.get(model.architecture),
        "base_model_name_or_path": base,
        "inference_mode": True,
        **_options_of(model, adaptation),
    }


def _options_of(model: "PretrainedModel", adaptation: Adaptation) -> dict[str, Any]:
    if isinstance(adaptation, Lora):
        chosen = [
            name
            for name, target, _ in lora_modules(model)
            if target in adaptation.targets_of(encoder_of(model).config)
        ]
        return {
            "r": adaptation.rank,
            "lora_alpha": adaptation.alpha,
            "lora_dropout": adaptation.dropout_p,
            "target_modules": [name_prefix(model) + name for name in chosen],
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


def _head_modules(model: "PretrainedModel") -> list[str]:
    names = {name.split(".")[0] for name in model.head_names().values()}
    if any("pooler" in name for name in head_parameters(model)):
        names.add("pooler")
    return sorted(names)


def name_prefix(model: "PretrainedModel") -> str:
    """The prefix of the encoder's names in transformers' model of this class."""
    return "" if model.architecture == "Model" else model_prefix(model)


def model_prefix(model: "PretrainedModel") -> str:
    return model.config.architecture.prefix_of(model.architecture)


def lora_modules(model: "PretrainedModel") -> list[tuple[str, str, int | None]]:
    """(the encoder's name of the module, LoRA target, layer's number or None outside the layers) of every module of the
    checkpoint that LoRA can be added to."""
    architecture = model.config.architecture
    names, targets = architecture.names(model.config), architecture.lora_targets(model.config)
    modules: list[tuple[str, str, int | None]] = [
        (theirs, target, None)
        for target in encoder_parts(encoder_of(model).config)
        if isinstance(theirs := names.get(ENCODER_PARTS[target]), str)
    ]
    for layer in range(len(encoder_of(model).layers)):
        for linear, several in targets.items():
            theirs = names[f"layers.{layer}.{linear}"]
            theirs = (theirs,) if isinstance(theirs, str) else theirs
            modules += [(name, target, layer) for name, target in zip(theirs, several, strict=True)]
    return modules


def _lora_targets(
    model: "PretrainedModel", values: Mapping[str, Any], where: Path
) -> tuple[str, ...]:
    """The LoRA targets by PEFT's target_modules, exclude_modules and layers_to_transform.

    Raises: ValueError if the targets are not the same in all layers.
    """
    wanted, excluded = values["target_modules"], values.get("exclude_modules") or ()
    numbers = values.get("layers_to_transform")
    numbers = [numbers] if isinstance(numbers, int) else numbers
    # Names may be those of a model with a head or of the encoder alone.
    prefix = model_prefix(model)
    chosen = [
        target
        for name, target, layer in lora_modules(model)
        if _selects(wanted, name, prefix)
        and not _selects(excluded, name, prefix)
        and (not numbers or layer in numbers)
    ]
    targets = tuple(dict.fromkeys(chosen))
    layers = len(encoder_of(model).layers)
    times = {target: 1 if target in ENCODER_PARTS else layers for target in targets}
    if not chosen or any(chosen.count(target) != times[target] for target in targets):
        limits = {"exclude_modules": excluded, "layers_to_transform": numbers}
        given = "".join(f" with {key} {value!r}" for key, value in limits.items() if value)
        raise ValueError(
            f"{where}: target_modules must name the same linear layers in all {layers} layers, "
            f"got {wanted!r}{given}: use PEFT for this adaptation"
        )
    return targets


def _selects(patterns: str | Sequence[str], name: str, prefix: str) -> bool:
    """Whether a regular expression or a list of name endings selects the module. Names may have the prefix or not."""
    if isinstance(patterns, str):
        return any(re.fullmatch(patterns, each) for each in (name, prefix + name))
    return any(f".{name}".endswith(f".{each.removeprefix(prefix)}") for each in patterns)
