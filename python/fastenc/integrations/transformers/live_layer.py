"""One layer of a live transformers model."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from fastenc.nn.adaptation import LayerAdaptation
from fastenc.nn.evaluation_mode import trains
from fastenc.nn.layer_call import NOT_PREPARED, LayerCall, Prepared
from fastenc.nn.layer_dropout import NO_DROPOUT, LayerDropout
from fastenc.nn.layer_inputs import AttentionInputs, LayerState
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.layer_weights import (
    OWN_NORMS,
    CrossWeights,
    GlobalWeights,
    LayerVectorWeights,
    LayerWeights,
    norm_factor,
    own_norm_factors,
    parameters_of,
)
from fastenc.nn.ways import run_layer

LINEARS = ("qkv", "attention_out", "up", "down")
# Linear layers and parameters that only some families have.
POSITIONS = ("position_key", "position_query")
GLOBAL_QKV = "global_qkv"
BIASES = ("query_bias", "value_bias")
# Those of a decoder's attention to the encoder's states.
CROSS = ("cross.query", "cross.key_value", "cross.out")
NORMS = ("attention_norm", "cross.norm", "out_norm")
# Those of a sublayer that a layer's vectors gate, and the buffer with the layer's scale.
VECTORS = ("vectors.gate", "vectors.out", "vectors.norm")
SCALE = "vectors.scale"


@dataclass(frozen=True)
class LiveLayer:
    """The modules of one layer. The weights are read from them in every call.

    Fields:
        module: transformers' module of the layer.
        modules: our name of a module → transformers' modules, whose weights are stacked.
        dropouts: the dropout probabilities, 0 in evaluation.
        added: the additions of PEFT's LoRA, active or not, or of :mod:`fastenc.adapt`; None without additions.
        biases: (module, name in it) of the parameters that are the biases of q and v, where k has none.
        scale: (module, name in it) of the buffer with the layer's scale, or None.
        spec: the description of the layer.
        has_more_weights: whether the layer has weights that only some families have.
    """

    module: nn.Module
    modules: dict[str, tuple[Any, ...]]
    dropouts: LayerDropout
    added: LayerAdaptation | None
    biases: tuple[tuple[nn.Module, str], ...]
    scale: tuple[nn.Module, str] | None
    spec: LayerSpec
    has_more_weights: bool = field(init=False)

    def __post_init__(self) -> None:
        rare = (*POSITIONS, *OWN_NORMS, *CROSS, *VECTORS, GLOBAL_QKV)
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
            *parameters_of(self._rare(POSITIONS[0])),
            *parameters_of(self._rare(POSITIONS[1])),
            *own_norm_factors(map(self._rare, OWN_NORMS), self.spec.out_norm),
            cross=self._cross() if "cross.query" in m else None,
            global_qkv=self._global_qkv() if GLOBAL_QKV in m else None,
            layer_vectors=self._layer_vectors() if self.scale is not None else None,
        )

    def _qkv_biases(self) -> tuple[Tensor | None, ...]:
        if not self.biases:
            return tuple(linear.bias for linear in self.modules["qkv"])
        query, value = (getattr(module, name) for module, name in self.biases)
        return (self.spec.attention.bias_without_key(query, value),)

    def _rare(self, name: str) -> Any:
        """A module that only some families have, or None."""
        return self.modules.get(name, (None,))[0]

    def _global_qkv(self) -> GlobalWeights:
        linears = self.modules[GLOBAL_QKV]
        weights = tuple(linear.weight for linear in linears)
        return GlobalWeights(weights, tuple(linear.bias for linear in linears))

    def _layer_vectors(self) -> LayerVectorWeights:
        assert self.scale is not None  # weights() has seen it
        module, name = self.scale
        gate, out, norm = (self.modules[each][0].weight for each in VECTORS)
        return LayerVectorWeights(gate, out, norm, module.get_buffer(name))

    def _cross(self) -> CrossWeights:
        (query,), (out,), (norm,) = (
            self.modules[f"cross.{name}"] for name in ("query", "out", "norm")
        )
        key_value = self.modules["cross.key_value"]
        return CrossWeights(
            *parameters_of(query),
            tuple(linear.weight for linear in key_value),
            tuple(linear.bias for linear in key_value),
            *parameters_of(out),
            norm.weight,
            getattr(norm, "bias", None),
        )

    def dropout(self) -> LayerDropout:
        return self.dropouts if trains(self.module) else NO_DROPOUT

    def draws_blocks(self) -> bool:
        return trains(self.module)

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
