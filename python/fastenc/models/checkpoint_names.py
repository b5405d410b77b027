"""The names of a model's weights in the checkpoints of its family, and the reading of such a checkpoint's tensors."""

import re
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from fastenc.models.checkpoint import is_table, same, weights_file
from fastenc.models.config import LAYER_MIX, EncoderConfig

# Buffers with constant values in older checkpoints, which are not read.
BUFFERS = (".position_ids", ".token_type_ids")
# Parameters that fastenc.adapt has added to the encoder.
ADDED = re.compile(r"(^|\.)(adaptations|prompts|parts)\.")


class CheckpointNames(nn.Module):
    """The part of a model that knows its weights' names in transformers' format.

    Attributes:
        architecture: transformers' class name without the family: "ForMaskedLM".
    """

    architecture: ClassVar[str]
    config: EncoderConfig

    def head_names(self) -> dict[str, str]:
        """Our name of a parameter or module of the head → its full name in the family's checkpoints."""
        return {}

    def parts(self, name: str, tensor: Tensor, count: int) -> tuple[Tensor, ...]:
        """The ``count`` tensors of a checkpoint that are stacked in our parameter of this name, or its gradient."""
        if count == 1:
            return (tensor,)
        module = name.rpartition(".")[0]
        return tensor.split(
            self.config.architecture.stacked_rows(self.config, module, tensor.shape[0], count)
        )

    def _prefix(self) -> str:
        """What the names of the encoder's weights begin with in a checkpoint with a head."""
        return self.config.architecture.prefix_of(self.architecture)

    def _tensors(self) -> dict[str, Tensor]:
        """The weights by their names in the family's checkpoints."""
        tensors: dict[str, Tensor] = {}
        state = self.state_dict()
        for ours, theirs in self.family_names(with_prefix=self.architecture != "Model").items():
            tensors.update(zip(theirs, self.parts(ours, state[ours], len(theirs)), strict=True))
        prefix = self._prefix() if self.architecture != "Model" else ""
        for name, value in self.constant_tensors(self.config).items():
            tensors[prefix + name] = value
        return self.config.architecture.export_state_dict(tensors, self.config)

    def family_names(self, with_prefix: bool) -> dict[str, tuple[str, ...]]:
        """Our name of a parameter → its names in the family's checkpoints; several tensors are stacked in ours."""
        architecture = self.config.architecture
        prefix = self._prefix() if with_prefix else ""
        encoder_names = {**architecture.names(self.config), "mix": LAYER_MIX}
        head_names = self.head_names()
        table: dict[str, tuple[str, ...]] = {}
        for key in self.state_dict():
            if ADDED.search(key):
                continue
            if key in head_names:
                table[key] = (head_names[key],)
                continue
            parameter = encoder_names.get(key.removeprefix("encoder."))
            if isinstance(parameter, str):
                table[key] = (f"{prefix}{parameter}",)
                continue
            module, leaf = key.rsplit(".", 1)
            if module in head_names:
                table[key] = (f"{head_names[module]}.{leaf}",)
                continue
            theirs = encoder_names[module.removeprefix("encoder.")]
            several = (theirs,) if isinstance(theirs, str) else theirs
            table[key] = tuple(f"{prefix}{name}.{leaf}" for name in several)
        return table

    @classmethod
    def constant_tensors(cls, config: EncoderConfig) -> dict[str, Tensor]:
        """The tensors of a checkpoint that are no weights, by their names without the prefix."""
        return config.architecture.constant_values(config)

    @classmethod
    def by_current_names(
        cls, config: EncoderConfig, tensors: dict[str, Tensor], folder: Path
    ) -> dict[str, Tensor]:
        """A checkpoint's tensors by transformers' current names, without the prefix.

        Raises: ValueError if two of them are the same weight of the model and differ.
        """
        renamed: dict[str, Tensor] = {}
        stored_as: dict[str, str] = {}
        for stored, tensor in tensors.items():
            for name, value in cls.renamed(config, stored, tensor).items():
                differs = name in renamed and not same(renamed[name], value)
                if differs and not name.endswith(BUFFERS):
                    raise ValueError(
                        f"{weights_file(folder)}: {stored_as[name]} and {stored} are the same weight of the "
                        "model, got different values: remove one of them"
                    )
                renamed[name], stored_as[name] = value, stored
        return renamed

    @classmethod
    def renamed(cls, config: EncoderConfig, stored: str, tensor: Tensor) -> dict[str, Tensor]:
        """One tensor by its current name or names; empty if the model does not read it."""
        architecture = config.architecture
        prefixes = {architecture.prefix_of(head) for head in ("", *architecture.head_prefixes)}
        for prefix in prefixes:
            stored = stored.removeprefix(prefix)
        return architecture.renamed(stored, tensor)

    def stored_prefixes(self) -> tuple[str, ...]:
        """The prefixes of the names of an encoder's weights without the pooler. All weights with them must be read."""
        flat = [
            name
            for ours, theirs in self.config.architecture.names(self.config).items()
            if ours != "pooler"
            for name in ((theirs,) if isinstance(theirs, str) else theirs)
        ]
        return tuple({f"{name.split('.')[0]}." for name in flat if "." in name})

    def _to_canonical(self, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
        """A checkpoint's tensors by our names.

        Raises: ValueError for missing or unexpected weights of the encoder, and for wrong shapes or dtypes.
        """
        missing: list[str] = []
        read: set[str] = set()
        state, heads = self.state_dict(), self.head_names()
        for ours, theirs in self.family_names(with_prefix=False).items():
            absent = [name for name in theirs if name not in tensors]
            # A checkpoint may lack the pooler, the mix of layers, this head, and layers that are only kept.
            optional = ours in heads or ours.rsplit(".", 1)[0] in heads
            optional = optional or "pooler" in ours or is_mix(ours) or "kept." in ours
            if absent:
                if not optional:
                    missing += absent
                continue
            for name, part in zip(theirs, self.parts(ours, state[ours], len(theirs)), strict=True):
                _check_tensor(name, tensors[name], part.shape, folder)
            several = [tensors[name] for name in theirs]
            state[ours] = torch.cat(several) if len(several) > 1 else several[0]
            read.update(theirs)
        if missing:
            raise ValueError(
                f"{folder} is incomplete: it lacks {_few(missing)}: write the checkpoint again, or check that "
                "config.json belongs to it"
            )
        self._check_unread(tensors.keys() - read, folder)
        return state

    def _check_unread(self, names: set[str], folder: Path) -> None:
        """Raise ValueError if weights of the encoder are among the names of a checkpoint that were not read."""
        ignored = self.config.architecture.unread
        unread = [
            name
            for name in sorted(names)
            if name.startswith(self.stored_prefixes())
            and not (name.endswith(BUFFERS) or name.startswith(ignored))
        ]
        if unread:
            raise ValueError(
                f"{weights_file(folder)} has {_few(unread)}, which the model of config.json does not have: "
                "do the two files belong together?"
            )


def is_mix(name: str) -> bool:
    """Whether a parameter belongs to the encoder's mix of layers."""
    return name.removeprefix("encoder.").startswith("mix.")


def with_constants(
    config: EncoderConfig, known: dict[str, Tensor], tensors: dict[str, Tensor], folder: Path
) -> EncoderConfig:
    """The configuration with the values of a checkpoint's constant tensors, which are taken out of ``tensors``.

    Args: known: from :meth:`CheckpointNames.constant_tensors`.
    Raises: ValueError for a table with other values than those that follow from the configuration.
    """
    keys, values = config.architecture.constants, dict(config.extra)
    for name in known.keys() | keys.keys():
        tensor = tensors.pop(name, None)
        if tensor is None or name not in known:
            continue
        _check_shape(name, tensor, known[name].shape, folder)
        if name in keys:
            values[keys[name]] = tensor.float().tolist()
        elif not is_table(tensor, known[name]):
            raise ValueError(
                f"{weights_file(folder)}: {name} must have the values that follow from config.json, got "
                "others: take transformers for this model"
            )
    return config.replace(extra=values) if values != config.extra else config


def check_depth(config: EncoderConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    """Raise ValueError if config.json has another number of layers than the weights.

    This comes before the model is built, because building takes long if config.json gives a very large number.
    """
    architecture = config.architecture
    path = architecture.layers_path
    if path is None:
        return
    layer = re.compile(rf"{re.escape(path)}\.(\d+)\.")
    depths = [int(match[1]) + 1 for match in map(layer.match, tensors) if match]
    if max(depths, default=0) != config.num_layers:
        raise ValueError(
            f"{weights_file(folder)} has {max(depths, default=0)} layers, but config.json says "
            f"{architecture.config_names['num_layers']} {config.num_layers}: do the two files belong together?"
        )


def _few(names: list[str]) -> str:
    """The first three names, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_tensor(name: str, tensor: Tensor, expected: torch.Size, folder: Path) -> None:
    """Raise ValueError for a checkpoint's tensor that has another shape or is quantized."""
    _check_shape(name, tensor, expected, folder)
    if not tensor.is_floating_point():
        raise ValueError(
            f"{weights_file(folder)}: {name} must be floating point, got {tensor.dtype}: write the checkpoint again, "
            "without quantization"
        )


def _check_shape(name: str, tensor: Tensor, expected: torch.Size, folder: Path) -> None:
    if tensor.shape != expected:
        raise ValueError(
            f"{weights_file(folder)}: {name} has shape {tuple(tensor.shape)}, but config.json asks for "
            f"{tuple(expected)}: do the two files belong together?"
        )
