"""Qwen3 as a bidirectional encoder (``"is_causal": false`` in config.json). Source: Yang et al. 2025, arXiv:2505.09388.

EuroBERT's layers, with an RMSNorm of each head's queries and keys. transformers has no masked-LM head for it. The head
for sequences reads the last token that is not padding, as that of the causal model.
"""

from dataclasses import replace
from typing import ClassVar

from fastenc.models.architectures.base import Architecture, HeadSpec, Names
from fastenc.models.architectures.eurobert import EuroBert
from fastenc.models.architectures.values import PROBABILITY, SWITCH, ConfigValues
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
    }
    # What transformers computes without the key is causal.
    needed: dict[str, object] = {"is_causal": False}
    supported = {"use_sliding_window": False}

    def check_supported(self, values: ConfigValues) -> None:
        super().check_supported(values)
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
        spec = super().layer(config, number)
        return replace(spec, attention=replace(spec.attention, head_norm_eps=config.eps))

    def names(self, config) -> Names:
        norms = {
            f"layers.{i}.{side}_norm": f"layers.{i}.self_attn.{letter}_norm"
            for i in range(config.num_layers)
            for side, letter in (("query", "q"), ("key", "k"))
        }
        return super().names(config) | norms
