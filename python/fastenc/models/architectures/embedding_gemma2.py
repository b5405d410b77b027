"""EmbeddingGemma 2: a bidirectional encoder with Gemma 4's layers. Source: transformers' embedding_gemma2, 2026.

Gemma 3's layers with these differences: a vector of each token for each layer gates a third sublayer
(:mod:`fastenc.nn.layer_vectors`), values are normalised too, norms have plain weights, scores are not scaled, and
layers without a window have heads of their own number and width. A linear layer follows the last norm.

The checkpoint also has towers for images and sounds, of which the encoder of texts reads nothing.
"""

from dataclasses import replace
from typing import Any

from fastenc.models.architectures.gemma3 import Gemma3, rope_of
from fastenc.models.architectures.modernbert import FULL, WIDEST
from fastenc.models.architectures.names import Names, in_layers
from fastenc.models.architectures.qwen3 import Qwen3
from fastenc.models.architectures.rotary import read_rotary
from fastenc.models.architectures.values import COUNT, TABLE, ConfigValues, check
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.rotary import RotarySpec

# The heads of layers without a window, where config.json does not give them.
FULL_HEADS = {"head_dim": 512, "num_key_value_heads": 1}


class EmbeddingGemma2(Gemma3):
    name = "embedding_gemma2_text"
    remote_name = "embedding_gemma2"
    class_prefix = "EmbeddingGemma2"
    bare_class = "TextModel"
    prefix = "language_model"
    classifier = None  # transformers has no heads for it
    defaults = Gemma3.defaults | {"max_positions": 262_144}
    new_config = Gemma3.new_config | {"max_positions": 262_144}
    needed = {}
    supported = {}
    rules = Gemma3.rules | {
        "sliding_window": COUNT,
        "per_layer_config": TABLE,
        "hidden_size_per_layer_input": COUNT,
        "embedding_dim": COUNT,
    }

    def normalize_config(self, values: ConfigValues) -> ConfigValues:
        text = values.get("text_config")
        values = values if text is None else {**text, "model_type": self.name}
        return super().normalize_config(values)

    def check_values(self, values: ConfigValues) -> None:
        super().check_values(values)
        layers = values.get("per_layer_config") or {}
        check(layers, dict.fromkeys(layers, TABLE), "config.json: per_layer_config's layer ")
        for number, given in layers.items():
            where = f"config.json: per_layer_config's layer {number}: "
            check(given or {}, dict.fromkeys(FULL_HEADS, COUNT), where)

    def check_supported(self, values: ConfigValues) -> None:
        super().check_supported(values)
        heads = values.get("num_attention_heads")
        for number, given in (values.get("per_layer_config") or {}).items():
            key_heads = (given or {}).get("num_key_value_heads")
            if heads and key_heads and heads % key_heads:
                raise ValueError(
                    f"config.json: per_layer_config's layer {number}: num_key_value_heads must divide "
                    f"num_attention_heads, got {key_heads} and {heads}: is the file damaged?"
                )

    def layer_type(self, config, number: int) -> str:
        # transformers changes that of the last layer.
        is_last = number == config.num_layers - 1
        return FULL if is_last else super().layer_type(config, number)

    def unwritten_values(self, config: Any) -> ConfigValues:
        return {}

    def layer(self, config, number: int) -> LayerSpec:
        spec = Qwen3.layer(self, config, number)
        heads = self._heads(config, number)
        key_heads, head_dim = heads["num_key_value_heads"], heads["head_dim"]
        attention = replace(
            spec.attention,
            head_dim=head_dim,
            key_heads=0 if key_heads == config.num_heads else key_heads,
            scale=1.0,
            normalises_values=True,
        )
        size = config.extra.get("hidden_size_per_layer_input", 512)
        return replace(spec, attention=attention, own_norms=True, layer_vector_size=size)

    def window_side(self, values: ConfigValues) -> int:
        return min(values.get("sliding_window", 512), WIDEST)

    def rotary(self, config, number: int) -> RotarySpec:
        layer_type = self.layer_type(config, number)
        theta = 1_000_000.0 if layer_type == FULL else 10_000.0
        head_dim = self._heads(config, number)["head_dim"]
        return read_rotary(rope_of(config.extra, layer_type), head_dim, theta, config.max_positions)

    def output_projection(self, config) -> int:
        return config.extra.get("embedding_dim", 768)

    def names(self, config) -> Names:
        of_vectors: Names = {
            "vectors.gate": "ple_block.per_layer_input_gate",
            "vectors.out": "ple_block.per_layer_projection",
            "vectors.norm": "ple_block.post_per_layer_input_norm",
            "vectors.scale": "layer_scalar",
        }
        return {
            **super().names(config),
            **in_layers(config.num_layers, "layers.{i}", of_vectors),
            "layer_vectors.projection": "ple.per_layer_model_projection",
            "layer_vectors.norm": "ple.per_layer_projection_norm",
            "output_projection": "embedding_projection",
        }

    def _heads(self, config, number: int) -> dict[str, int]:
        """The width of a layer's heads and the number of its heads of keys."""
        of_all = {
            "head_dim": config.head_dim,
            "num_key_value_heads": config.extra.get("num_key_value_heads") or config.num_heads,
        }
        given = config.extra.get("per_layer_config")
        if given is None:
            is_full = self.layer_type(config, number) == FULL
            return {**of_all, **(FULL_HEADS if is_full else {})}
        # The layers' numbers are texts in a file.
        of_layer = given.get(str(number)) or given.get(number) or {}
        return {key: of_layer.get(key, value) for key, value in of_all.items()}
