"""Qwen3 as a bidirectional encoder (``"is_causal": false`` in config.json). Source: Yang et al. 2025, arXiv:2505.09388.

EuroBERT's layers, with an RMSNorm of each head's queries and keys. transformers' heads read the last token of a causal
model, so there are none here.
"""

from dataclasses import replace
from typing import Any

from fastenc.models.architectures.base import Names
from fastenc.models.architectures.eurobert import EuroBert
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
    classifier = None
    token_classifier = None
    # What transformers computes without the key is causal.
    needed: dict[str, object] = {"is_causal": False}
    supported = {"use_sliding_window": False}

    def check_supported(self, values: dict[str, Any]) -> None:
        super().check_supported(values)
        for key, value in self.needed.items():
            if values.get(key) is not value:
                raise ValueError(
                    f"config.json: {key} must be {value}, got {values.get(key)}: a causal model is no encoder"
                )

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
