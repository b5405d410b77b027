"""The result of reading a live transformers model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastenc.integrations.transformers.live_layer import LiveLayer
from fastenc.integrations.transformers.live_model import (
    Contents,
    weight_difference,
)
from fastenc.models.checkpoint import is_table
from fastenc.nn.convolution import ConvolutionWeights
from fastenc.nn.frozen_layers import FrozenLayers
from fastenc.nn.layer_vectors import LayerVectorTable
from fastenc.nn.relative_positions import position_table
from fastenc.nn.stack import StackModules
from fastenc.ops import dispatch


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
        merged: of each linear layer with PEFT's LoRA, the adapters that are merged into its weight.
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
    merged: tuple[tuple[str, ...], ...] = ()

    def without_dropout(self) -> "Reading":
        """The same reading without dropout outside the layers. Each layer asks itself whether it has dropout."""
        return self._replace(
            embedding_dropout_p=0.0, final_dropout_p=0.0, convolution_dropout_p=0.0
        )

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
            self._layer_vectors(),
        )

    def _layer_vectors(self) -> LayerVectorTable | None:
        made, norm = (self.modules.get(f"layer_vectors.{name}") for name in ("projection", "norm"))
        return None if made is None or norm is None else LayerVectorTable(made.weight, norm.weight)

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
        # The table that was compared last, which is held so that no other one gets its address, its contents, and
        # whether they were these values. The tuple is replaced as a whole, because several threads may compare.
        self._compared: tuple[Tensor, Contents, bool] | None = None

    def same_as(self, other: "FixedTable") -> bool:
        """Whether both have the same module and must have the same values."""
        return self._module is other._module and torch.equal(self._values, other._values)

    def is_unchanged(self) -> bool:
        """Whether the table has these values. Comparing them waits for an accelerator, but only once after a change."""
        table = self._module.weight
        if table.is_meta:
            return True
        if self._compared is not None:
            held, contents, was_equal = self._compared
            if held.data_ptr() == table.data_ptr() and contents.are_those_of(table):
                return was_equal
        contents, is_equal = Contents(table), is_table(table, self._values)
        self._compared = table.detach(), contents, is_equal
        return is_equal
