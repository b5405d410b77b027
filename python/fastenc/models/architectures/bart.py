"""The encoders of BART (post-norm) and mBART (pre-norm). Sources: Lewis et al. 2019, arXiv:1910.13461; Liu et al. 2020,
arXiv:2001.08210.

From a checkpoint of a whole BART only the encoder is read. To patch a live model, use ``model.get_encoder()``.
"""

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from fastenc.models.architectures.base import Architecture, Names, in_layers
from fastenc.models.architectures.values import PROBABILITY, SWITCH
from fastenc.nn.layer_spec import LayerDropout, LayerSpec

POSITION_OFFSET = 2  # rows of the position table that transformers leaves unused
TABLE = "embed_tokens.weight"


class Bart(Architecture):
    name = "bart"
    class_prefix = "Bart"
    prefix = ""
    bare_class = "Encoder"
    config_names = {
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "num_layers": "encoder_layers",
        "num_heads": "encoder_attention_heads",
        "intermediate_size": "encoder_ffn_dim",
        "max_positions": "max_position_embeddings",
        "activation": "activation_function",
        "hidden_dropout_p": "dropout",
        "attention_dropout_p": "attention_dropout",
        "classifier_dropout_p": "classifier_dropout",
        "initializer_range": "init_std",
    }
    new_config = {
        "type_vocab_size": 0,
        "pad_token_id": 1,
        "position_offset": POSITION_OFFSET,
        "eps": 1e-5,
        "pooler": False,
    }
    defaults = {"eps": 1e-5, "pad_token_id": 1, "position_offset": POSITION_OFFSET}
    has_pooler = False
    has_token_types = False
    # transformers' heads for BART read its decoder.
    token_classifier = None
    question_answerer = None
    pre_norm = False
    rules = {
        "encoder_layerdrop": PROBABILITY.or_none(),
        "activation_dropout": PROBABILITY.or_none(),
        "scale_embedding": SWITCH,
    }

    def check_supported(self, values: dict[str, Any]) -> None:
        if values.get("encoder_layerdrop"):
            raise ValueError(
                f"config.json: encoder_layerdrop must be 0, because this encoder never skips a layer, got "
                f"{values['encoder_layerdrop']}: set it to 0, which changes nothing in evaluation"
            )

    def write(self, config) -> dict[str, Any]:
        return super().write(config) | {"max_position_embeddings": config.max_positions}

    def layer(self, config, number: int) -> LayerSpec:
        return replace(super().layer(config, number), pre_norm=self.pre_norm)

    def layer_dropout(self, config) -> LayerDropout:
        p = config.hidden_dropout_p
        inner = float(config.extra.get("activation_dropout") or 0.0)
        return LayerDropout(config.attention_dropout_p, p, inner, p)

    def embedding_scale(self, config) -> float:
        return math.sqrt(config.hidden_size) if config.extra.get("scale_embedding") else 1.0

    def names(self, config) -> Names:
        layer: Names = {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention_out": "self_attn.out_proj",
            "attention_norm": "self_attn_layer_norm",
            "up": "fc1",
            "down": "fc2",
            "out_norm": "final_layer_norm",
        }
        return {
            "embeddings.word": "embed_tokens",
            "embeddings.position": "embed_positions",
            "embeddings.norm": "layernorm_embedding",
            **in_layers(config.num_layers, "layers.{i}", layer),
        }

    def renamed(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """From a checkpoint of a whole BART or of its encoder."""
        name = name.removeprefix("model.")
        if name == "shared.weight":  # the word embeddings, shared with the decoder
            name = TABLE
        return {} if name.startswith("decoder.") else {name.removeprefix("encoder."): tensor}


class MBart(Bart):
    name = "mbart"
    class_prefix = "MBart"
    pre_norm = True

    def first_norm(self, config) -> bool:
        return True

    def names(self, config) -> Names:
        names, last = super().names(config), config.num_layers - 1
        for i in range(config.num_layers):
            path = f"layers.{i}"
            names[f"{path}.attention_norm"] = f"{path}.final_layer_norm"
            # The first norm of a layer is described as the last norm of the preceding layer (nn/layer_spec.py).
            names[f"{path}.out_norm"] = (
                "layer_norm" if i == last else f"layers.{i + 1}.self_attn_layer_norm"
            )
        return names | {"first_norm": "layers.0.self_attn_layer_norm"}
