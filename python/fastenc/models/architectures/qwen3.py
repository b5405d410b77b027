"""Qwen3 as a bidirectional encoder (``"is_causal": false`` in config.json). Source: Yang et al. 2025, arXiv:2505.09388.

EuroBERT's layers, with an RMSNorm of each head's queries and keys. transformers has no masked-LM head for it. The head
for sequences reads the last token that is not padding, as that of the causal model.
"""

from dataclasses import replace
from typing import ClassVar

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
from fastenc.models.architectures.names import Names, query_key_norms
from fastenc.models.architectures.values import (
    AT_LEAST_0,
    COUNT,
    PROBABILITY,
    SWITCH,
    ConfigValues,
)
from fastenc.nn.layer_spec import LayerSpec


class Qwen3(EuroBert):
    name = "qwen3"
    class_prefix = "Qwen3"
    defaults = EuroBert.defaults | {
        "eps": 1e-6,
        "pad_token_id": 0,
        "head_dim": 128,
        "max_positions": 32768,
    }
    new_config = EuroBert.new_config | {"eps": 1e-6, "max_positions": 32768}
    takes_left_padding = True
    lm_head = None
    head_prefixes = {"ForQuestionAnswering": "transformer"}
    classifier: ClassVar[HeadSpec | None] = HeadSpec(
        {"out": "score"}, dropout_after=False, out_bias=False
    )
    token_classifier: ClassVar[HeadSpec | None] = HeadSpec({"out": "score"})
    question_answerer: ClassVar[HeadSpec | None] = Architecture.question_answerer
    rules = EuroBert.rules | {
        "classifier_dropout": PROBABILITY.or_none(),
        "hidden_dropout": PROBABILITY.or_none(),
        "token_classification_bias": SWITCH,
        "use_sliding_window": SWITCH,
        "sliding_window": COUNT.or_none(),
        "max_window_layers": AT_LEAST_0,
        "layer_types": LAYER_TYPES,
    }
    # What transformers computes without the key is causal.
    needed: dict[str, object] = {"is_causal": False}

    def check_values(self, values: ConfigValues) -> None:
        super().check_values(values)
        check_layer_types(values)

    def check_supported(self, values: ConfigValues) -> None:
        super().check_supported(values)
        if SLIDING in (values.get("layer_types") or ()) and self.window_side(values) is None:
            raise ValueError(
                "config.json: sliding_window must be an integer if layer_types has 'sliding_attention', got none or "
                "use_sliding_window false: correct one of them"
            )
        for key, value in self.needed.items():
            if values.get(key) is not value:
                raise ValueError(
                    f"config.json: {key} must be {value}, got {values.get(key)}: a causal model is no encoder"
                )

    def head(self, config, spec: HeadSpec) -> HeadSpec:
        if spec is not self.token_classifier:
            return spec
        return replace(spec, out_bias=config.extra.get("token_classification_bias", True))

    def classifier_pooling(self, config) -> str:
        return "last"

    def token_classifier_dropout_p(self, config) -> float:
        given = (config.extra.get(key) for key in ("classifier_dropout", "hidden_dropout"))
        return next((p for p in given if p is not None), 0.1)

    def layer(self, config, number: int) -> LayerSpec:
        spec, side = super().layer(config, number), self.window_side(config.extra)
        if side is None or self.layer_type(config, number) == FULL:
            side = -1
        attention = replace(spec.attention, head_norm_eps=config.eps, window=(side, side))
        return replace(spec, attention=attention)

    def window_side(self, values: ConfigValues) -> int | None:
        """The number of tokens on each side that a token sees in layers with a window; None: no layer has one."""
        side = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
        return None if side is None else min(side, WIDEST)

    def layer_type(self, config, number: int) -> str:
        types = config.extra.get("layer_types")
        if types:
            return types[number]
        return FULL if number < config.extra.get("max_window_layers", 28) else SLIDING

    def names(self, config) -> Names:
        return super().names(config) | query_key_norms(config.num_layers)
