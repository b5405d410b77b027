"""Files of an adaptation: the added weights and the head, without the encoder.

LoRA and prefixes are written and read in the PEFT library's format (adapter_config.json, adapter_model.safetensors). A
PEFT model loaded from these files predicts the same, except that PEFT's question answering, and its feature extraction
with a prefix, ignore token types. PEFT has no format for bottlenecks and prompts; they have names of this library.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc._base.files import write_atomically, write_text_atomically
from fastenc.models import checkpoint
from fastenc.models.adapters.adaptation_methods import Adaptation, Lora, PrefixTuning
from fastenc.models.adapters.adaptations import (
    Additions,
    add_modules,
    added_modules,
    check_new,
    encoder_of,
    head_parameters,
    name_of_task,
    new_modules,
    use_adaptation,
)
from fastenc.models.adapters.adapter_config import (
    adaptation_of,
    adapter_config_of,
    lora_modules,
    model_prefix,
    name_prefix,
)
from fastenc.nn.adaptation import LowRank, LowRankRows
from fastenc.text.tokenizer_files import find_tokenizer

if TYPE_CHECKING:
    from fastenc.models.encoder import Encoder
    from fastenc.models.pretrained import PretrainedModel

BASE, PROMPT = "base_model.", "prompt_embeddings"


def is_adapted(model: "PretrainedModel") -> bool:
    """Whether saving the model means saving an adaptation: one is in use, and not merged."""
    encoder = encoder_of(model)
    return encoder.adapted.current is not None and not encoder.adapted.unmerged_weights


def load(
    cls: Any,
    folder: Path,
    values: dict[str, Any],
    dtype: torch.dtype,
    options: dict[str, Any],
) -> Any:
    """Load the base model of a folder's adaptation, with the adaptation and the head.

    Args: values: the contents of config.json, which describe the head.
    Raises: ValueError if the base model is not found under the name that the folder gives.
    """
    model = cls._load(checkpoint.base_of(folder), values, dtype, options)
    _add_from(folder, model, "default")
    if (found := find_tokenizer(folder)) is not None:
        model.tokenizer = found
    return model


def load_adaptation(model: "PretrainedModel", folder: str | Path, name: str = "default") -> None:
    """Add the adaptation of a folder to a model and use it.

    Raises: ValueError for a damaged file, an adaptation of another model, task or labels, and as
        :func:`add_adaptation`; the model is then unchanged.
    """
    folder = Path(folder)
    _check_head(folder, model)
    _add_from(folder, model, name)


def write(folder: Path, model: "PretrainedModel") -> None:
    """Write the adaptation in use and the head.

    Raises: ValueError when the model does not know which checkpoint its encoder came from.
    """
    name = encoder_of(model).adapted.current
    assert name is not None  # is_adapted(model)
    if model.base is None:
        raise ValueError(
            "an adaptation is saved with the path of its encoder's checkpoint, got an encoder that was not loaded from "
            "a checkpoint: save it before adding the adaptation, and load it from there"
        )
    if Path(model.base).resolve() == folder.resolve():
        raise ValueError(
            f"an adaptation must be saved in another folder than its encoder's checkpoint, got {folder} for both"
        )
    _write(folder, model, name, model.base)


def remove(folder: Path) -> None:
    """Remove the files of an adaptation, which would be loaded in place of the folder's own weights."""
    for name in (checkpoint.ADAPTER_CONFIG, checkpoint.ADAPTER_WEIGHTS):
        (folder / name).unlink(missing_ok=True)


def write_tasks(folder: Path, encoder: "Encoder") -> None:
    """Write each adaptation that the checkpoint has for a task into a folder of its name, in a model's folder."""
    for name in encoder.adapted.tasks:
        _write(folder / name, encoder, name, str(folder))


def read_tasks(folder: Path, encoder: "Encoder") -> None:
    """Add what :func:`write_tasks` wrote, and keep the adaptation in use.

    Raises: ValueError for a missing or damaged file.
    """
    in_use, tasks = encoder.adapted.current, [*encoder.config.architecture.tasks(encoder.config)]
    for name in map(name_of_task, tasks):
        _add_from(folder / name, encoder, name)
    _name_tasks(encoder, tasks, in_use)


def add_tasks(
    model: "PretrainedModel", tasks: Mapping[str, Mapping[str, Tensor]], folder: Path
) -> None:
    """Add a LoRA for each task, and use none of them.

    Args:
        model: an encoder without a head.
        tasks: task → the matrices by PEFT's names without its prefixes.
        folder: the checkpoint, for error messages.
    """
    encoder = encoder_of(model)
    for task, tensors in tasks.items():
        targets = [
            target
            for target, modules in _modules_by_target(encoder).items()
            if any(f"{module}.lora_" in key for module in modules for key in tensors)
        ]
        values = encoder.config.architecture.lora_of_tasks(encoder.config)
        lora = Lora(targets=targets, **values)
        _add(encoder, lora, tensors, name_of_task(task), checkpoint.weights_file(folder))
    _name_tasks(encoder, [*tasks], None)


def _name_tasks(encoder: "Encoder", tasks: Sequence[str], in_use: str | None) -> None:
    encoder.adapted.tasks = tuple(map(name_of_task, tasks))
    use_adaptation(encoder, in_use)


def _modules_by_target(model: "PretrainedModel") -> dict[str, list[str]]:
    """LoRA target → the checkpoint's modules."""
    modules: dict[str, list[str]] = {}
    for name, target, _ in lora_modules(model):
        modules.setdefault(target, []).append(name)
    return modules


def _write(folder: Path, model: "PretrainedModel", name: str, base: str) -> None:
    encoder = encoder_of(model)
    adaptation = encoder.adapted.descriptions[name]
    added = _added(model, adaptation, added_modules(encoder, name))
    # PEFT wraps a model in two modules for LoRA and in one for a prefix.
    wrapper = BASE
    if isinstance(adaptation, Lora):
        wrapper = f"{BASE}model."
        added = {wrapper + name_prefix(model) + key: tensors for key, tensors in added.items()}
    head = _head(model, with_prefix=bool(name_prefix(model)))
    stored = {**added, **{wrapper + key: [tensor] for key, (_, tensor) in head.items()}}
    held = {
        key: torch.cat([tensor.cpu() for tensor in tensors], -1).contiguous()
        for key, tensors in stored.items()
    }
    save_file = require("safetensors.torch", extra="models").save_file
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / checkpoint.ADAPTER_WEIGHTS,
        lambda path: save_file(held, path, metadata={"format": "pt"}),
    )
    text = json.dumps(adapter_config_of(model, adaptation, base), indent=2, sort_keys=True) + "\n"
    write_text_atomically(folder / checkpoint.ADAPTER_CONFIG, text)


def _check_head(folder: Path, model: "PretrainedModel") -> None:
    """Raise ValueError if the folder's head is for another task or other labels than the model's."""
    if not (folder / checkpoint.CONFIG).exists():  # PEFT stores the task only
        task = checkpoint.read_adapter_config(folder).get("task_type") or ""
        model.check_task(folder, {"architectures": [checkpoint.PEFT_TASKS.get(task, "")]})
        return
    values = checkpoint.read_config(folder)
    model.check_task(folder, values)
    for key, expected in json.loads(json.dumps(model.extra_config())).items():
        if values.get(key, expected) != expected:
            raise ValueError(
                f"{folder} has a head whose {key} is {values[key]}, the model's is {expected}: load it as a separate "
                f"model, {type(model).__name__}.from_pretrained({str(folder)!r})"
            )


def _add_from(folder: Path, model: "PretrainedModel", name: str) -> None:
    """:func:`load_adaptation` without the check of the head."""
    where = folder / checkpoint.ADAPTER_CONFIG
    adaptation = adaptation_of(checkpoint.read_adapter_config(folder), model, where)
    check_new(model, adaptation, name)
    stored = checkpoint.read_adapter_tensors(folder)
    _add(model, adaptation, stored, name, folder / checkpoint.ADAPTER_WEIGHTS)


def _add(
    model: "PretrainedModel",
    adaptation: Adaptation,
    tensors: Mapping[str, Tensor],
    name: str,
    where: Path,
) -> None:
    """Add an adaptation with the values of a file's ``tensors``, and use it."""
    added = new_modules(encoder_of(model), adaptation)
    stored = _stored_values(tensors, where, model, adaptation, added)
    add_modules(model, adaptation, added, name)
    with torch.no_grad():
        for tensor, value in stored:
            tensor.copy_(value)


def _stored_values(
    tensors: Mapping[str, Tensor],
    where: Path,
    model: "PretrainedModel",
    adaptation: Adaptation,
    modules: Additions,
) -> list[tuple[Tensor, Tensor]]:
    """(tensor, its value in the file) for each tensor of the modules and of the model's head.

    Raises: ValueError for a file that is damaged or belongs to another model.
    """
    prefix = model_prefix(model)
    plain = lambda key: key.removeprefix(BASE).removeprefix("model.").removeprefix(prefix)
    stored = {plain(key): value for key, value in tensors.items()}
    added, head = _added(model, adaptation, modules), _head(model, with_prefix=False)
    if missing := added.keys() - stored.keys():
        raise ValueError(f"{where} lacks {min(missing)}: does it belong to this model?")
    if surplus := [key for key in stored if ".lora_" in key and key not in added]:
        raise ValueError(
            f"{where} has {min(surplus)}, and LoRA is added to the linear layers of attention and feed-forward, the "
            "embeddings and the pooler alone: train it without that module"
        )
    _check_encoder_weights(model, stored, head.keys(), where)
    # PEFT stores the modules of a head that modules_to_save names. The others keep the base model's values.
    held = head.keys() & stored.keys()
    first = {key for key, (name, _) in head.items() if name in model.first_weights}
    if held and (missing := first - held):
        raise ValueError(
            f"{where} lacks the head's {min(missing)}, and the base model lacks it too: was it trained without "
            "modules_to_save for it?"
        )
    targets = {**added, **{key: [head[key][1]] for key in head if key in held}}
    values: list[tuple[Tensor, Tensor]] = []
    for key, parts in targets.items():
        widths = [tensor.shape[-1] for tensor in parts]
        expected = (*parts[0].shape[:-1], sum(widths))
        if stored[key].shape != expected:
            raise ValueError(
                f"{where}: {key} has shape {tuple(stored[key].shape)}, the model's is {expected}: "
                "does it belong to this model?"
            )
        values += zip(parts, stored[key].split(widths, -1), strict=True)
    return values


def _check_encoder_weights(
    model: "PretrainedModel", stored: Mapping[str, Tensor], head: Collection[str], where: Path
) -> None:
    """Raise ValueError if the file has weights of the encoder that differ from the base model's.

    PEFT writes the modules that modules_to_save names. Sometimes it also writes the embeddings, although they have not
    changed.
    """
    own = model.state_dict()
    for ours, several in model.family_names(with_prefix=False).items():
        for name in several:
            wrapped = f"{name.rpartition('.')[0]}.base_layer.{name.rpartition('.')[2]}"
            value = stored.get(name, stored.get(wrapped))
            if value is None or name in head:
                continue
            weight = own[ours]
            if torch.equal(value.to(weight), weight) or torch.equal(weight.to(value), value):
                continue
            raise ValueError(
                f"{where} has another {name} than the base model, but an adaptation must not replace weights of the "
                "encoder: train it without modules_to_save for it, or merge it with PEFT"
            )


def _added(
    model: "PretrainedModel", adaptation: Adaptation, modules: Additions
) -> dict[str, list[Tensor]]:
    """Name in the file, without prefixes of PEFT and of a head → the tensors with its values, which the file holds
    concatenated along the last dimension."""
    if modules.prompt is not None:
        return {PROMPT: [modules.prompt.detach()]}
    if isinstance(adaptation, PrefixTuning):
        prefixes = [added.prefix for added in modules.layers if added.prefix is not None]
        return {PROMPT: [prefix.detach().flatten(1) for prefix in prefixes]}
    if isinstance(adaptation, Lora):
        return {
            f"{module}.lora_{name}": [matrix.detach()]
            for module, target, layer in lora_modules(model)
            if target in adaptation.targets_of(encoder_of(model).config)
            for name, matrix in _matrices(model, modules, target, layer).items()
        }
    return {
        f"layers.{number}.{key}": [parameter.detach()]
        for number, added in enumerate(modules.layers)
        for key, parameter in added.named_parameters()
    }


def _matrices(
    model: "PretrainedModel", modules: Additions, target: str, layer: int | None
) -> dict[str, Tensor]:
    """The end of PEFT's name → the matrix that it names."""
    if layer is None:
        assert modules.parts is not None  # one of its targets is asked for
        low_rank = modules.parts[target]
        if isinstance(low_rank, LowRankRows):
            return {"embedding_A": low_rank.a.T, "embedding_B": low_rank.b.T}
    else:
        targets = model.config.architecture.lora_targets(model.config)
        linear = next(name for name, several in targets.items() if target in several)
        low_rank = modules.layers[layer].low_rank[linear]
    assert isinstance(low_rank, LowRank)
    return {"A.weight": low_rank.a[target], "B.weight": low_rank.b[target]}


def _head(model: "PretrainedModel", with_prefix: bool) -> dict[str, tuple[str, Tensor]]:
    """The family's name of each parameter of the head → (our name, the parameter)."""
    theirs = model.family_names(with_prefix)
    return {
        theirs[ours][0]: (ours, parameter.detach())
        for ours, parameter in head_parameters(model).items()
    }
