"""Gemma 3's text model as a bidirectional encoder (EmbeddingGemma: ``use_bidirectional_attention``).

Sources: Gemma Team 2025, arXiv:2503.19786; Schechter Vera et al. 2025, arXiv:2509.20354 (EmbeddingGemma).

Qwen3's layers with GeGLU, norms whose factor is 1 + weight, a norm of each sublayer's output before it is added, and a
window in five of six layers. The word embeddings are scaled by the root of the width.
"""

from dataclasses import replace
from typing import Any

from fastenc.models.architectures.modernbert import FULL, SLIDING, WIDEST
from fastenc.models.architectures.names import Names
from fastenc.models.architectures.qwen3 import Qwen3
from fastenc.models.architectures.rotary import read_rotary, read_scaling
from fastenc.models.architectures.values import COUNT, POSITIVE, SWITCH, TABLE, ConfigValues, check
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.rotary import RotarySpec

# Type of a layer → (key of its theta in older files, default).
THETA = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}


class Gemma3(Qwen3):
    name = "gemma3_text"
    class_prefix = "Gemma3Text"
    config_names = Qwen3.config_names | {"activation": "hidden_activation"}
    defaults = Qwen3.defaults | {
        "activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "max_positions": 131_072,
    }
    # transformers has no other heads for it.
    token_classifier = None
    question_answerer = None
    head_prefixes = {}
    new_config = Qwen3.new_config | {"activation": "gelu_pytorch_tanh", "max_positions": 131_072}
    needed = {"use_bidirectional_attention": True}
    supported = {"attn_logit_softcapping": None}
    rules = Qwen3.rules | {
        "sliding_window_pattern": COUNT,
        "_sliding_window_pattern": COUNT,
        "query_pre_attn_scalar": POSITIVE,
        "rope_local_base_freq": POSITIVE,
        "use_bidirectional_attention": SWITCH.or_none(),
    }

    def check_values(self, values: ConfigValues) -> None:
        super().check_values(values)
        check(values.get("rope_parameters") or {}, dict.fromkeys(THETA, TABLE), "config.json: ")

    def unwritten_values(self, config: Any) -> ConfigValues:
        """transformers holds the number of tokens on one side and itself; old versions also write it so."""
        side = config.sliding_window
        return {} if side is None else {"sliding_window": 2 * (side - 1)}

    def check_rotary(self, values: ConfigValues) -> None:
        for layer_type in THETA:
            read_scaling(rope_of(values, layer_type), self.defaults["max_positions"])

    def layer(self, config, number: int) -> LayerSpec:
        spec = super().layer(config, number)
        scale = config.extra.get("query_pre_attn_scalar", 256) ** -0.5
        norm = replace(spec.out_norm, plus_one=True)
        return replace(
            spec,
            attention=replace(spec.attention, scale=scale),
            attention_norm=norm,
            out_norm=norm,
            own_norms=True,
        )

    def window_side(self, values: ConfigValues) -> int:
        return min((values.get("sliding_window") or 4096) // 2, WIDEST)

    def rotary(self, config, number: int) -> RotarySpec:
        layer_type = self.layer_type(config, number)
        old, default = THETA[layer_type]
        theta = config.extra.get(old, default)
        rope = rope_of(config.extra, layer_type)
        return read_rotary(rope, config.head_dim, theta, config.max_positions)

    def embedding_scale(self, config) -> float:
        return config.hidden_size**0.5

    def names(self, config) -> Names:
        names = super().names(config)
        for i in range(config.num_layers):
            path = f"layers.{i}"
            names |= {
                f"{path}.attention_own_norm": f"{path}.post_attention_layernorm",
                f"{path}.attention_norm": f"{path}.pre_feedforward_layernorm",
                f"{path}.down_own_norm": f"{path}.post_feedforward_layernorm",
            }
        return names

    def layer_type(self, config, number: int) -> str:
        types = config.extra.get("layer_types")
        if types:
            return types[number]
        extra = config.extra
        every = extra.get("sliding_window_pattern") or extra.get("_sliding_window_pattern") or 6
        return SLIDING if (number + 1) % every else FULL


def rope_of(values: ConfigValues, layer_type: str) -> ConfigValues:
    """The rope_parameters of a type of layers. In older files ``rope_scaling`` is that of layers without a window."""
    given = (values.get("rope_parameters") or {}).get(layer_type)
    if given is None and layer_type == FULL:
        given = values.get("rope_scaling")
    return given or {}
