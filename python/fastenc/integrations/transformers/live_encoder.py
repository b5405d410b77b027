"""Reads the encoder of a live transformers model: its layers' weights, descriptions and dropout probabilities."""

import copy
import os
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fastenc.integrations.transformers.hooks import forward_reason
from fastenc.integrations.transformers.live_layer import (
    BIASES,
    CROSS,
    GLOBAL_QKV,
    LINEARS,
    NORMS,
    POSITIONS,
    SCALE,
    VECTORS,
    LiveLayer,
)
from fastenc.integrations.transformers.live_model import (
    Allowed,
    Snapshot,
    attention_difference,
    first_difference,
    new_of_same_class,
    output_class,
)
from fastenc.integrations.transformers.live_reading import FixedTable, Reading
from fastenc.integrations.transformers.lora import (
    LiveLora,
    LiveLowRank,
    base_linear,
    is_lora_linear,
)
from fastenc.models.architectures import ARCHITECTURES, Architecture
from fastenc.models.config import EncoderConfig
from fastenc.nn.adaptation import LayerAdaptation
from fastenc.nn.embeddings import EmbeddingSpec
from fastenc.nn.frozen_weights import FrozenWeights
from fastenc.nn.layer_dropout import NO_DROPOUT, LayerDropout
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.layer_weights import OWN_NORMS, LayerWeights
from fastenc.nn.relative_positions import position_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


POOLER = "pooler"
# Attributes that refer to the model's modules.
_NOT_COPIED: dict[str, object] = {"_last": None, "_source": None}


class LiveEncoder:
    """What :func:`fastenc.patch` stores for one encoder. A call changes nothing in it except the cached last reading.

    Attributes:
        config: the model's configuration at the time of patching.
        embeddings: the description of the embeddings.
        stack: the description of the layers; a module's index is the one in ``Reading.layers``.
        output_class: the class that the own forward returns.
        frozen: the copies of the weights that :func:`fastenc.freeze` made.
    """

    def __init__(self, model: "PreTrainedModel", is_decoder: bool = False):
        self.frozen, self._is_decoder = FrozenWeights(), is_decoder
        self._tables: tuple[FixedTable, ...] = ()
        self._source: tuple[tuple[Any, ...], tuple[tuple[str, ...], ...]] | None = None
        self.output_class = output_class(model)
        self._describe(model)

    def _describe(self, model: "PreTrainedModel") -> None:
        self._changes = self._architecture_of(model).live_changes(model)
        self._dtype = model.dtype
        self.config = self._read_config(model)
        architecture = self.config.architecture
        self._expected = new_of_same_class(model, self._changes)
        self._take_constants(model)
        self.stack = architecture.stack(self.config)
        self.embeddings = EmbeddingSpec(
            architecture.embedding_norm(self.config),
            architecture.embedding_scale(self.config),
            architecture.projects_embeddings_first(self.config)
            and architecture.embedding_projection(self.config),
            architecture.drops_before_embedding_norm(self.config),
            architecture.masked_embedding(self.config),
        )
        # T5's names begin with the stack's, which may be patched without the model around it.
        part = "" if hasattr(model, "encoder") else "decoder." if self._is_decoder else "encoder."
        self._names = {
            ours: tuple(name.removeprefix(part) for name in _several(theirs))
            for ours, theirs in architecture.names(self.config).items()
        }
        self._dropouts = {
            ours: theirs.removeprefix(part)
            for ours, theirs in architecture.dropout_names(self.config).items()
        }
        linears = [
            self._names[f"layers.{index}.{name}"]
            for index in range(architecture.layer_modules(self.config))
            for name in (*LINEARS, *CROSS)
            if f"layers.{index}.{name}" in self._names
        ]
        self._allowed = Allowed(
            frozenset({POOLER}),
            frozenset(path for paths in linears for path in paths),
            frozenset(self._dropouts.values()),
            frozenset(
                path
                for ours, paths in self._names.items()
                if ours.endswith(SCALE)
                for path in paths
            )
            # M2M100's module of positions has its table as a buffer.
            | {f"{path}.weights" for path in self._names.get("embeddings.position", ())},
        )
        self._last: tuple[Snapshot, dict[str, object], Reading] | None = None

    def _read_config(self, model: "PreTrainedModel") -> EncoderConfig:
        architecture = self._architecture_of(model)
        unwritten = architecture.unwritten_values(model.config)
        values = {**model.config.to_dict(), **unwritten, **self._changes}
        values["model_type"] = architecture.name
        if not self._is_decoder:
            return EncoderConfig.from_hf(values)
        return EncoderConfig.from_hf(values | {"is_decoder": False}).decoder()

    @staticmethod
    def _architecture_of(model: "PreTrainedModel") -> Architecture:
        # The stacks of an encoder-decoder are of other classes than the encoder alone.
        return architecture_of(model) or ARCHITECTURES[model.config.model_type]

    def _take_constants(self, model: "PreTrainedModel") -> None:
        """Take the constants that the family's checkpoints have as tensors, which no configuration holds."""
        extra = dict(self.config.extra)
        for name, key in self.architecture.constants.items():
            if name not in self.architecture.constant_values(self.config):
                continue
            path, _, buffer = name.rpartition(".")
            values = model.get_submodule(path).get_buffer(buffer)
            extra[key] = values.float().tolist()
            setattr(self._expected.get_submodule(path), buffer, values.detach().clone())
        if extra != self.config.extra:
            self.config = self.config.replace(extra=extra)

    @property
    def architecture(self) -> Architecture:
        return self.config.architecture

    def read(self, model: "PreTrainedModel") -> Reading:
        """Read the model. The last reading is returned if the model has not changed since."""
        if model.dtype != self._dtype or self.architecture.live_changes(model) != self._changes:
            self._describe(model)
        last, values = self._last, vars(model.config)
        if last is not None and last[1] == values and last[0].is_current():
            return last[2]
        snapshot, values = Snapshot(model.modules()), copy.deepcopy(values)
        reason = forward_reason(model) or self._configuration_difference(model)
        reason = reason or attention_difference(model.config)
        reason = reason or first_difference(model, self._expected, self._allowed)
        reading = self._read_modules(model) if reason is None else Reading(reason)
        if reason is None:
            self._drop_copies_of_others(reading)
        self._last = snapshot, values, reading
        return reading

    def _drop_copies_of_others(self, reading: Reading) -> None:
        """Unfreeze a model if a linear layer was replaced, or PEFT's LoRA merged or removed, since it was read."""
        source = reading.multiplied, reading.merged
        if self._source not in (None, source):
            self.frozen.drop()
        self._source = source

    def _configuration_difference(self, model: "PreTrainedModel") -> str | None:
        """How the attention windows and blocks in the configuration have changed, or None.

        transformers reads them in each call. The other values are read only when a model is built.
        """
        try:
            now = self._read_config(model)
            seen = [*map(_reach, self.architecture.stack(now).layers)]
        except (ValueError, LookupError) as error:
            return f"its configuration was changed: {error}"
        if seen == [*map(_reach, self.stack.layers)]:
            return None
        return "its configuration names other windows or blocks"

    def _read_modules(self, model: "PreTrainedModel") -> Reading:
        """The reading of a model that has the modules of its class."""
        if model.training and getattr(model, "layerdrop", 0.0):  # of BART and its kin
            return Reading("it skips layers in training")
        layers = []
        for index in range(self.architecture.layer_modules(self.config)):
            path = self._layer_path(model, index)
            if self._is_partly_training(model.get_submodule(path), path):
                return Reading(f"some modules of {path} are in training mode, and others are not")
            layers.append(self._read_layer(model, index, path))
        outside = {
            name: _found(model, paths[0])
            for name, paths in self._names.items()
            if not name.startswith("layers.")
        }
        embeddings = self._dropout_p(
            model, "embeddings", self.architecture.embedding_dropout_p(self.config)
        )
        final = self._dropout_p(model, "final", self.architecture.final_dropout_p(self.config))
        convolution = self._dropout_p(model, "convolution", 0.0)
        if 1.0 in (
            embeddings,
            final,
            convolution,
            *(p for layer in layers for p in layer.dropouts),
        ):
            return Reading("a probability of dropout is 1")
        linears = (module for layer in layers for name in LINEARS for module in layer.modules[name])
        return Reading(
            None,
            tuple(layers),
            outside,
            embeddings,
            final,
            convolution,
            self._weighted(model),
            tuple(linears),
            self._fixed_tables(model),
            tuple(tuple(each.merged_adapters) for each in filter(is_lora_linear, model.modules())),
        )

    def _layer_path(self, model: "PreTrainedModel", index: int) -> str:
        """The path of transformers' module of a layer."""
        names = (*self._names[f"layers.{index}.qkv"], *self._names[f"layers.{index}.up"])
        path = _common_parent(names)
        # T5 keeps a layer's two sublayers in a list.
        is_list = isinstance(model.get_submodule(path), nn.ModuleList)
        return path.rpartition(".")[0] if is_list else path

    def _read_layer(self, model: "PreTrainedModel", index: int, path: str) -> LiveLayer:
        module = model.get_submodule(path)
        modules = {
            name: tuple(map(model.get_submodule, self._names[f"layers.{index}.{name}"]))
            for name in (*LINEARS, *POSITIONS, GLOBAL_QKV, *CROSS, *NORMS, *OWN_NORMS, *VECTORS)
            if f"layers.{index}.{name}" in self._names
        }
        return LiveLayer(
            module,
            {name: tuple(map(base_linear, several)) for name, several in modules.items()},
            self._dropout(model, index) if module.training else NO_DROPOUT,
            _added(modules),
            tuple(self._tensors_of_layer(model, index, BIASES)),
            next(self._tensors_of_layer(model, index, (SCALE,)), None),
            self.stack.of_module(index),
        )

    def _tensors_of_layer(
        self, model: "PreTrainedModel", index: int, names: Iterable[str]
    ) -> Iterator[tuple[nn.Module, str]]:
        """(module, name in it) of parameters and buffers of a layer, by our names. Those that it lacks are left out."""
        for name in names:
            for path in self._names.get(f"layers.{index}.{name}", ()):
                owner, _, attribute = path.rpartition(".")
                yield model.get_submodule(owner), attribute

    def _fixed_tables(self, model: "PreTrainedModel") -> tuple["FixedTable", ...]:
        values = self.architecture.constant_values(self.config)
        names = values.keys() - self.architecture.constants.keys()
        path = lambda name: name.removesuffix(".weight")
        tables = [FixedTable(model.get_submodule(path(n)), values[n]) for n in names]
        # Those of an earlier reading know that they were compared.
        earlier = lambda table: next(filter(table.same_as, self._tables), table)
        self._tables = tuple(map(earlier, tables))
        return self._tables

    def _weighted(self, model: "PreTrainedModel") -> tuple[tuple[Any, torch.Size], ...]:
        weighted = []
        for name, paths in self._names.items():
            if name == POOLER:
                continue  # its own forward computes it
            for path in paths:
                live, expected = _found(model, path), _found(self._expected, path)
                is_norm = name.endswith("norm") and getattr(expected, "weight", None) is not None
                if is_norm or isinstance(expected, nn.Linear):
                    weighted.append((base_linear(live), expected.weight.shape))
        return tuple(weighted)

    def _is_partly_training(self, layer: nn.Module, path: str) -> bool:
        """Whether some modules of a layer are in training mode and others are not, except linear layers and LoRA."""
        inner = self._expected.get_submodule(path).named_modules()
        names = [name for name, module in inner if not isinstance(module, nn.Linear)]
        return len({layer.get_submodule(name).training for name in names}) > 1

    def _dropout_p(self, model: "PreTrainedModel", name: str, described: float) -> float:
        path = self._dropouts.get(name)
        if path is None:
            return described if model.training else 0.0
        module = model.get_submodule(path)
        return cast(float, module.p) if module.training else 0.0

    def _dropout(self, model: "PreTrainedModel", index: int) -> LayerDropout:
        described = self.architecture.layer_dropout(self.config)
        read: dict[str, Any] = {}
        for name in LayerDropout._fields:
            path = self._dropouts.get(f"layers.{index}.{name}")
            if path is not None:
                read[name] = model.get_submodule(path).p
        return described._replace(**read)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | _NOT_COPIED

    def __deepcopy__(self, memo: dict) -> "LiveEncoder":
        """Copied with the model, whose copy has other modules: the cached reading is left out."""
        new = object.__new__(LiveEncoder)
        frozen = copy.deepcopy(self.frozen, memo)
        new.__dict__ = self.__dict__ | _NOT_COPIED | {"frozen": frozen}
        return new


class FrozenOwner:
    """Gives :class:`FrozenWeights` the weights of a patched model."""

    def __init__(self, model: "PreTrainedModel", live: LiveEncoder):
        self._model, self._live = model, live

    def layer_weights(self) -> list[tuple[LayerWeights, LayerSpec]]:
        """(weights, description) of every module that computes layers.

        Raises: ValueError if the model cannot run the fused forward.
        """
        return [
            (layer.weights(), self._live.stack.of_module(index))
            for index, layer in enumerate(self._layers())
        ]

    def position_rows(self) -> Tensor | None:
        """The rows of the table of relative positions after its norm, or None if no layer reads it."""
        table = self._reading().stack_modules(None).position_table
        spec = self._live.stack.relative_positions
        return None if table is None or spec is None else position_rows(table, spec)

    def layer_adaptations(self) -> list[LayerAdaptation | None]:
        """What PEFT adds to each of them, or None."""
        return [layer.adapted() for layer in self._layers()]

    def _layers(self) -> tuple[LiveLayer, ...]:
        return self._reading().layers

    def _reading(self) -> Reading:
        reading = self._live.read(self._model)
        reason = reading.unsupported_reason or reading.weight_difference()
        if reason is not None:
            raise ValueError(
                f"freeze needs a model that runs the fused forward, got {type(self._model).__name__}, which runs its "
                f"own forward, because {reason}: undo that, or leave out freeze"
            )
        return reading


def architecture_of(base: Any) -> Architecture | None:
    """The architecture for transformers' class of ``base``, or None if it is not supported.

    The configuration may be that of a model around it: DPR's BERT has a DPRConfig.
    """
    model_class = type(base)
    is_theirs = model_class.__module__.startswith("transformers.")
    return _by_class().get(model_class.__name__) if is_theirs else None


@cache
def _by_class() -> dict[str, Architecture]:
    return {each.class_name("Model"): each for each in ARCHITECTURES.values()}


def _found(model: "PreTrainedModel", path: str) -> Any:
    """The module at this path, or None if there is none (such as ELECTRA's projection between equal widths)."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _reach(spec: LayerSpec) -> tuple[object, ...]:
    """What tokens of a layer see."""
    return spec.attention.window, spec.attention.block_size, spec.attention.random_blocks


def _several(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else paths


def _common_parent(paths: Iterable[str]) -> str:
    return os.path.commonpath([path.replace(".", "/") for path in paths]).replace("/", ".")


def _added(modules: dict[str, tuple[Any, ...]]) -> LayerAdaptation | None:
    low_rank: dict[str, Any] = {
        name.replace(".", "_"): LiveLowRank(modules[name])
        for name in (*LINEARS, *CROSS)
        if any(map(is_lora_linear, modules.get(name, ())))
    }
    return LiveLora(low_rank) if low_rank else None
