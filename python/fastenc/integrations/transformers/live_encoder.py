"""Reads the encoder of a live transformers model: its layers' weights, descriptions and dropout probabilities."""

import copy
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fastenc.integrations.transformers.live_model import (
    Allowed,
    Contents,
    Snapshot,
    first_difference,
    new_of_same_class,
    output_class,
    weight_difference,
)
from fastenc.integrations.transformers.lora import (
    LiveLora,
    LiveLowRank,
    base_linear,
    is_lora_linear,
)
from fastenc.models.architectures import ARCHITECTURES, Architecture
from fastenc.models.architectures.base import is_table
from fastenc.models.config import EncoderConfig
from fastenc.nn.adaptation import LayerAdaptation
from fastenc.nn.convolution import ConvolutionWeights
from fastenc.nn.embeddings import EmbeddingSpec
from fastenc.nn.frozen_layers import FrozenLayers
from fastenc.nn.frozen_weights import FrozenWeights
from fastenc.nn.layer_call import NOT_PREPARED, LayerCall, Prepared
from fastenc.nn.layer_spec import (
    NO_DROPOUT,
    AttentionInputs,
    CrossWeights,
    GlobalWeights,
    LayerDropout,
    LayerSpec,
    LayerState,
    LayerWeights,
    OwnNormFactors,
    norm_factor,
)
from fastenc.nn.relative_positions import position_rows, position_table
from fastenc.nn.stack import StackModules
from fastenc.nn.ways import run_layer
from fastenc.ops import dispatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LINEARS = ("qkv", "attention_out", "up", "down")
# Linear layers and parameters that only some families have.
POSITIONS = ("position_key", "position_query")
GLOBAL_QKV = "global_qkv"
BIASES = ("query_bias", "value_bias")
OWN_NORMS = ("query_norm", "key_norm", "attention_own_norm", "down_own_norm")
# Those of a decoder's attention to the encoder's states.
CROSS = ("cross.query", "cross.key_value", "cross.out")
NORMS = ("attention_norm", "cross.norm", "out_norm")
POOLER = "pooler"


@dataclass(frozen=True)
class LiveLayer:
    """The modules of one layer. The weights are read from them in every call.

    Fields:
        module: transformers' module of the layer.
        modules: our name of a module → transformers' modules, whose weights are stacked.
        dropouts: the dropout probabilities, 0 in evaluation.
        added: the additions of PEFT's LoRA, active or not, or of :mod:`fastenc.adapt`; None without additions.
        biases: (module, name in it) of the parameters that are the biases of q and v, where k has none.
        spec: the description of the layer.
        has_more_weights: whether the layer has weights that only some families have.
    """

    module: nn.Module
    modules: dict[str, tuple[Any, ...]]
    dropouts: LayerDropout
    added: LayerAdaptation | None
    biases: tuple[tuple[nn.Module, str], ...]
    spec: LayerSpec
    has_more_weights: bool = field(init=False)

    def __post_init__(self) -> None:
        rare = (*POSITIONS, *OWN_NORMS, *CROSS, GLOBAL_QKV)
        object.__setattr__(self, "has_more_weights", not self.modules.keys().isdisjoint(rare))

    def weights(self) -> LayerWeights:
        m = self.modules
        (attention_out,), (attention_norm,) = m["attention_out"], m["attention_norm"]
        (down,), (out_norm,) = m["down"], m["out_norm"]
        always = (
            tuple([linear.weight for linear in m["qkv"]]),
            self._qkv_biases(),
            attention_out.weight,
            attention_out.bias,
            norm_factor(attention_norm.weight, self.spec.attention_norm),
            getattr(attention_norm, "bias", None),
            tuple([linear.weight for linear in m["up"]]),
            tuple([linear.bias for linear in m["up"]]),
            down.weight,
            down.bias,
            norm_factor(out_norm.weight, self.spec.out_norm),
            getattr(out_norm, "bias", None),
        )
        if not self.has_more_weights:  # most families, and this runs in every call
            return LayerWeights(*always)
        return LayerWeights(
            *always,
            *self._position_projections(),
            *self._own_norm_factors(),
            cross=self._cross() if "cross.query" in m else None,
            global_qkv=self._global_qkv() if GLOBAL_QKV in m else None,
        )

    def _qkv_biases(self) -> tuple[Tensor | None, ...]:
        if not self.biases:
            return tuple(linear.bias for linear in self.modules["qkv"])
        query, value = (getattr(module, name) for module, name in self.biases)
        return (self.spec.attention.bias_without_key(query, value),)

    def _own_norm_factors(self) -> OwnNormFactors:
        """The factors of ``OWN_NORMS``, None for one that the layer lacks."""
        spec = self.spec.out_norm  # all norms of a layer are of one kind
        factor = lambda norm: None if norm is None else norm_factor(norm.weight, spec)
        query, key, attention, down = (factor(self.modules.get(n, (None,))[0]) for n in OWN_NORMS)
        return query, key, attention, down

    def _position_projections(
        self,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Weight and bias of each, None for one that the layer lacks."""
        key, query = (self.modules.get(name, (None,))[0] for name in POSITIONS)
        return *_parameters(key), *_parameters(query)

    def _global_qkv(self) -> GlobalWeights:
        linears = self.modules[GLOBAL_QKV]
        weights = tuple(linear.weight for linear in linears)
        return GlobalWeights(weights, tuple(linear.bias for linear in linears))

    def _cross(self) -> CrossWeights:
        (query,), (out,), (norm,) = (
            self.modules[f"cross.{name}"] for name in ("query", "out", "norm")
        )
        key_value = self.modules["cross.key_value"]
        return CrossWeights(
            *_parameters(query),
            tuple(linear.weight for linear in key_value),
            tuple(linear.bias for linear in key_value),
            *_parameters(out),
            norm.weight,
            getattr(norm, "bias", None),
        )

    def dropout(self) -> LayerDropout:
        return self.dropouts

    def draws_blocks(self) -> bool:
        return self.module.training

    def recomputes(self) -> bool:
        """Whether the backward computes the layer again (gradient checkpointing)."""
        return self.module.training and getattr(self.module, "gradient_checkpointing", False)

    def adapted(self) -> LayerAdaptation | None:
        return self.added if self.added is not None and self.added.is_active() else None

    def with_added(self, added: LayerAdaptation | None) -> "LiveLayer":
        """The layer with the modules of :mod:`fastenc.adapt`.

        Raises: ValueError if PEFT's LoRA is active in the layer.
        """
        if added is None:
            return self
        if self.adapted() is not None:
            raise ValueError(
                "a layer takes one adaptation, got PEFT's LoRA and one of fastenc.adapt: call the PEFT model's "
                "disable_adapter(), or use_adaptation(encoder, None)"
            )
        return replace(self, added=added)

    def __call__(
        self,
        state: LayerState,
        inputs: AttentionInputs,
        spec: LayerSpec,
        dropout: LayerDropout,
        prepared: Prepared = NOT_PREPARED,
    ) -> LayerState:
        weights = self.weights() if prepared.weights is None else prepared.weights
        return run_layer(LayerCall(state, inputs, weights, spec, dropout, self.adapted(), prepared))


class Reading(NamedTuple):
    """The result of reading a live model.

    Fields:
        unsupported_reason: why the fused forward cannot run, so that the own forward must; or None.
        layers: one for each module that computes layers.
        modules: our name → module outside the layers, or None if the model does not have it.
        embedding_dropout_p, final_dropout_p, convolution_dropout_p: dropout probabilities, 0 in evaluation.
        weighted: (module, shape of its weight in a new model) for each linear layer and norm.
        multiplied: the linear layers of the layers.
        fixed: the tables that follow from the configuration.
    """

    unsupported_reason: str | None
    layers: tuple[LiveLayer, ...] = ()
    modules: Mapping[str, Any] = {}
    embedding_dropout_p: float = 0.0
    final_dropout_p: float = 0.0
    convolution_dropout_p: float = 0.0
    weighted: tuple[tuple[Any, torch.Size], ...] = ()
    multiplied: tuple[Any, ...] = ()
    fixed: tuple["FixedTable", ...] = ()

    def stack_modules(self, frozen: FrozenLayers | None) -> StackModules:
        """The layers and what they share, for one call."""
        norm, tables = self.modules.get("first_norm"), list[Tensor]()
        while (table := self.modules.get(f"relative_biases.{len(tables)}")) is not None:
            tables.append(table.weight)
        return StackModules(
            self.layers,
            None if norm is None else (norm.weight, getattr(norm, "bias", None)),
            tables,
            self.final_dropout_p,
            [layer.recomputes() for layer in self.layers],
            frozen,
            position_table(
                self.modules.get("relative_positions"), self.modules.get("position_norm")
            ),
            self._convolution(),
        )

    def _convolution(self) -> ConvolutionWeights | None:
        conv, norm = (self.modules.get(f"convolution.{name}") for name in ("conv", "norm"))
        if conv is None or norm is None:
            return None
        return ConvolutionWeights(
            conv.weight, conv.bias, norm.weight, norm.bias, self.convolution_dropout_p
        )

    def weight_difference(self) -> str | None:
        """Why the kernels cannot take one of the current weights, or None."""
        for module, shape in self.weighted:
            difference = weight_difference(module, shape)
            if difference is not None:
                return difference
        if (reason := self.dtypes_reason()) is not None:
            return reason
        if not all(table.is_unchanged() for table in self.fixed):
            return "a table that follows from its configuration was changed"
        return None

    def dtypes_reason(self) -> str | None:
        """Why the layers cannot multiply with weights of their dtypes, or None."""
        dtypes = {module.weight.dtype for module in self.multiplied}
        # Autocast casts them all.
        if len(dtypes) < 2 or dispatch.autocast_dtype(self.multiplied[0].weight.device.type):
            return None
        return f"its linear layers are of {' and '.join(sorted(map(str, dtypes)))}"


class FixedTable:
    """A table of a live model whose values the fused forward computes itself.

    Args: module: the one with the table as its weight; values: those that it must have.
    """

    def __init__(self, module: Any, values: Tensor):
        self._module, self._values = module, values
        # The table that was compared last, which is held so that no other one gets its address, and its contents.
        self._compared: tuple[Tensor, Contents] | None = None
        self._was_equal = False

    def same_as(self, other: "FixedTable") -> bool:
        """Whether both have the same module and must have the same values."""
        return self._module is other._module and torch.equal(self._values, other._values)

    def is_unchanged(self) -> bool:
        """Whether the table has these values. Comparing them waits for an accelerator, but only once after a change."""
        table = self._module.weight
        if table.is_meta:
            return True
        if self._compared is not None:
            held, contents = self._compared
            if held.data_ptr() == table.data_ptr() and contents.are_those_of(table):
                return self._was_equal
        self._compared = table.detach(), Contents(table)
        self._was_equal = is_table(table, self._values)
        return self._was_equal


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
        self.output_class = output_class(model)
        self._describe(model)

    def _describe(self, model: "PreTrainedModel") -> None:
        self._changes = ARCHITECTURES[model.config.model_type].live_changes(model)
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
        )
        self._last: tuple[Snapshot, dict[str, object], Reading] | None = None

    def _read_config(self, model: "PreTrainedModel") -> EncoderConfig:
        unwritten = ARCHITECTURES[model.config.model_type].unwritten_values(model.config)
        values = {**model.config.to_dict(), **unwritten, **self._changes}
        if not self._is_decoder:
            return EncoderConfig.from_hf(values)
        return EncoderConfig.from_hf(values | {"is_decoder": False}).decoder()

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
        if self.architecture.live_changes(model) != self._changes:
            self._describe(model)
        last, values = self._last, vars(model.config)
        if last is not None and last[1] == values and last[0].is_current():
            return last[2]
        snapshot, values = Snapshot(model.modules()), copy.deepcopy(values)
        reason = self._configuration_difference(model)
        reason = reason or first_difference(model, self._expected, self._allowed)
        reading = self._read_modules(model) if reason is None else Reading(reason)
        self._last = snapshot, values, reading
        return reading

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
        layers = []
        for index in range(self.architecture.layer_modules(self.config)):
            modules = {
                name: tuple(map(model.get_submodule, self._names[f"layers.{index}.{name}"]))
                for name in (*LINEARS, *POSITIONS, GLOBAL_QKV, *CROSS, *NORMS, *OWN_NORMS)
                if f"layers.{index}.{name}" in self._names
            }
            path = _common_parent(
                (*self._names[f"layers.{index}.qkv"], *self._names[f"layers.{index}.up"])
            )
            module = model.get_submodule(path)
            if isinstance(module, nn.ModuleList):  # T5 keeps a layer's two sublayers in a list
                path = path.rpartition(".")[0]
                module = model.get_submodule(path)
            if self._is_partly_training(module, path):
                return Reading(f"some modules of {path} are in training mode, and others are not")
            dropout = self._dropout(model, index) if module.training else NO_DROPOUT
            without_lora = {
                name: tuple(map(base_linear, several)) for name, several in modules.items()
            }
            biases = [self._names.get(f"layers.{index}.{name}", ("",))[0] for name in BIASES]
            owned = [path.rpartition(".") for path in biases if path]
            layers.append(
                LiveLayer(
                    module,
                    without_lora,
                    dropout,
                    _added(modules),
                    tuple((model.get_submodule(owner), name) for owner, _, name in owned),
                    self.stack.of_module(index),
                )
            )
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
        )

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
        return self.__dict__ | {"_last": None}

    def __deepcopy__(self, memo: dict) -> "LiveEncoder":
        """Copied with the model, whose copy has other modules: the cached reading is left out."""
        new = object.__new__(LiveEncoder)
        new.__dict__ = self.__dict__ | {"_last": None, "frozen": copy.deepcopy(self.frozen, memo)}
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
        reason = reading.unsupported_reason or reading.dtypes_reason()
        if reason is not None:
            raise ValueError(
                f"freeze needs a model that runs the fused forward, got {type(self._model).__name__}, which runs its "
                f"own forward, because {reason}: undo that, or leave out freeze"
            )
        return reading


def architecture_of(base: Any) -> Architecture | None:
    """The architecture for transformers' class of ``base``, or None if it is not supported."""
    model_class, architecture = type(base), ARCHITECTURES.get(base.config.model_type)
    if architecture is None or not model_class.__module__.startswith("transformers."):
        return None
    name = architecture.class_prefix + architecture.bare_class
    return architecture if model_class.__name__ == name else None


def _found(model: "PreTrainedModel", path: str) -> Any:
    """The module at this path, or None if there is none (such as ELECTRA's projection between equal widths)."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _reach(spec: LayerSpec) -> tuple[object, ...]:
    """What tokens of a layer see."""
    return spec.attention.window, spec.attention.block_size, spec.attention.random_blocks


def _parameters(linear: Any) -> tuple[Any, Tensor | None]:
    return (None, None) if linear is None else (linear.weight, linear.bias)


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
