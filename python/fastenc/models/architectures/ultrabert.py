"""UltraBERT: EuroBERT's layers, two of three with an attention window.

Rotary angles have a base for each type of layer. The masked-LM head has two dense layers. Source: transformers'
``ultrabert``, for dmis-lab/UltraBERT-150M.
"""

import re
from dataclasses import replace

from torch import Tensor

from fastenc.models.architectures.base import Architecture
from fastenc.models.architectures.eurobert import EuroBert
from fastenc.models.architectures.modernbert import (
    FULL,
    LAYER_TYPES,
    SLIDING,
    WIDEST,
    check_layer_types,
)
from fastenc.models.architectures.modules import HeadSpec
from fastenc.models.architectures.rotary import read_rotary, read_scaling
from fastenc.models.architectures.values import (
    AT_LEAST_0,
    COUNT,
    TABLE,
    ConfigValues,
    Rule,
    check,
    one_of,
)
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.rotary import RotarySpec

# Type of a layer → the default of its theta.
THETA = {SLIDING: 10_000.0, FULL: 2_560_000.0}
FOR_EACH_LAYER = Rule("a list of one value for each layer", lambda value: isinstance(value, list))


class UltraBert(EuroBert):
    name = "ultrabert"
    class_prefix = "Ultrabert"
    config_names = EuroBert.config_names | {"classifier_dropout_p": "classifier_dropout"}
    defaults = EuroBert.defaults | {"eps": 1e-6, "pad_token_id": 0, "max_positions": 32768}
    new_config = EuroBert.new_config | {"eps": 1e-6, "max_positions": 32768}
    lm_head = HeadSpec(
        {"inner": "head.linear1", "dense": "head.linear2", "decoder": "head.decoder"},
        activation="gelu_tanh",
        dense_bias=False,
    )
    classifier = token_classifier = HeadSpec({"out": "classifier"})
    question_answerer = Architecture.question_answerer
    rules = EuroBert.rules | {
        "classifier_pooling": one_of(("cls", "mean")),
        "layer_types": LAYER_TYPES,
        **dict.fromkeys(("attention_windows", "rope_theta"), FOR_EACH_LAYER.or_none()),
        "prediction_head_size": COUNT,
        "sliding_window": AT_LEAST_0,
    }

    def check_values(self, values: ConfigValues) -> None:
        super().check_values(values)
        check_layer_types(values)
        check(values.get("rope_parameters") or {}, dict.fromkeys(THETA, TABLE), "config.json: ")

    def check_rotary(self, values: ConfigValues) -> None:
        for layer_type in THETA:
            read_scaling(_rope(values, layer_type), self.defaults["max_positions"])

    def normalize_config(self, values: ConfigValues) -> ConfigValues:
        """Older files have a window and a theta for each layer; a window of 0 or null is none."""
        values = super().normalize_config(values)
        windows, thetas = values.get("attention_windows"), values.get("rope_theta")
        if isinstance(windows, list):
            side = next(filter(None, windows), values.get("sliding_window", 128))
            from_windows = [SLIDING if window else FULL for window in windows]
            types = values.get("layer_types") or from_windows
            values = {**values, "sliding_window": side, "layer_types": types}
            del values["attention_windows"]
        if isinstance(thetas, list):
            types = values.get("layer_types") or [*map(_default_type, range(len(thetas)))]
            rope = {each: {"rope_theta": theta} for each, theta in zip(types, thetas, strict=False)}
            values = {**values, "rope_parameters": values.get("rope_parameters") or rope}
            del values["rope_theta"]
        return values

    def layer(self, config, number: int) -> LayerSpec:
        spec = super().layer(config, number)
        if self._layer_type(config, number) == FULL:
            return spec
        side = min(config.extra.get("sliding_window", 128), WIDEST)
        return replace(spec, attention=replace(spec.attention, window=(side, side)))

    def layer_lists(self, config) -> dict[str, list[str]]:
        layers = range(config.num_layers)
        return {"layer_types": [self._layer_type(config, number) for number in layers]}

    def rotary(self, config, number: int) -> RotarySpec:
        layer_type = self._layer_type(config, number)
        rope = _rope(config.extra, layer_type)
        return read_rotary(rope, config.head_dim, THETA[layer_type], config.max_positions)

    def head(self, config, spec: HeadSpec) -> HeadSpec:
        if spec is not self.lm_head:
            return spec
        return replace(spec, inner_size=config.extra.get("prediction_head_size", 768))

    def decoder_bias(self, config) -> bool:
        return False

    def classifier_pooling(self, config) -> str:
        return config.extra.get("classifier_pooling", "cls")

    def token_classifier_dropout_p(self, config) -> float:
        return config.classifier_dropout_p or 0.0

    def renamed(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        # transformers' classes have other names than the files that they write.
        name = name.removeprefix("ultrabert.")
        return super().renamed(re.sub(r"^cls\.", "head.decoder.", name), tensor)

    def _layer_type(self, config, number: int) -> str:
        types = config.extra.get("layer_types")
        return types[number] if types else _default_type(number)


def _default_type(number: int) -> str:
    return SLIDING if (number + 1) % 3 else FULL


def _rope(values: ConfigValues, layer_type: str) -> ConfigValues:
    return (values.get("rope_parameters") or {}).get(layer_type) or {}
