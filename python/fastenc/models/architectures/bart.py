"""Encoders and decoders of BART (post-norm) and mBART (pre-norm).

Sources: Lewis et al. 2019, arXiv:1910.13461; Liu et al. 2020, arXiv:2001.08210.

In training, transformers skips a layer with the probability ``encoder_layerdrop`` or ``decoder_layerdrop``. Here no
layer is skipped. In evaluation transformers skips none.

An encoder's names are those of transformers' BartEncoder, to which a checkpoint of a whole BART is reduced.
"""

import math
from dataclasses import replace

from torch import Tensor

from fastenc.models.architectures.base import Architecture
from fastenc.models.architectures.names import Names, first_norms, in_layers
from fastenc.models.architectures.values import COUNT, PROBABILITY, SWITCH, ConfigValues
from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.layer_spec import LayerSpec

POSITION_OFFSET = 2  # rows of the position table that transformers leaves unused
TABLE = "embed_tokens.weight"
LAYERDROPS = ("encoder_layerdrop", "decoder_layerdrop")
# Field of a decoder's configuration → key in config.json.
DECODER_SIZES = {
    "num_layers": "decoder_layers",
    "num_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
}


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
    has_decoder = True
    whole_prefix = "model"
    eos_token_id = 2
    target_start = "end"
    # transformers' heads for BART read its decoder.
    token_classifier = None
    question_answerer = None
    pre_norm = False
    rules = {
        **dict.fromkeys(LAYERDROPS, PROBABILITY.or_none()),
        **dict.fromkeys(DECODER_SIZES.values(), COUNT),
        "activation_dropout": PROBABILITY.or_none(),
        "scale_embedding": SWITCH,
    }

    def write(self, config) -> ConfigValues:
        # What is missing, transformers would take from BART-large.
        decoder = {
            theirs: config.extra.get(theirs, getattr(config, ours))
            for ours, theirs in DECODER_SIZES.items()
        }
        return super().write(config) | decoder | {"max_position_embeddings": config.max_positions}

    def layer(self, config, number: int) -> LayerSpec:
        return replace(super().layer(config, number), pre_norm=self.pre_norm)

    def layer_dropout(self, config) -> LayerDropout:
        p = config.hidden_dropout_p
        inner = float(config.extra.get("activation_dropout") or 0.0)
        of_attention = config.attention_dropout_p
        cross = (of_attention, p) if config.is_decoder else (0.0, 0.0)
        return LayerDropout(of_attention, p, inner, p, 0.0, *cross)

    def initial_zero_row(self, config, name: str) -> int | None:
        return config.pad_token_id if name.endswith("embeddings.word") else None

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
        if config.is_decoder:
            layer |= {
                "cross.query": "encoder_attn.q_proj",
                "cross.key_value": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
                "cross.out": "encoder_attn.out_proj",
                "cross.norm": "encoder_attn_layer_norm",
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

    def decoder_sizes(self, config) -> ConfigValues:
        given = config.extra
        return {ours: given[theirs] for ours, theirs in DECODER_SIZES.items() if theirs in given}

    def decoder_start(self, config) -> int | None:
        starts = {"end": self.eos_token_id, "padding": config.pad_token_id, "language": None}
        return config.extra.get("decoder_start_token_id", starts[self.target_start])

    def has_logits_bias(self, config) -> bool:
        return True

    def name_in_whole(self, config, name: str) -> str:
        return f"{'decoder' if config.is_decoder else 'encoder'}.{name}"


class MBart(Bart):
    name = "mbart"
    class_prefix = "MBart"
    pre_norm = True
    target_start = "language"

    def first_norm(self, config) -> bool:
        return True

    def names(self, config) -> Names:
        # The first norm of a sublayer is described as the last norm of the preceding one (nn/layer_spec.py).
        norms: Names = {"attention_norm": "final_layer_norm"}
        if config.is_decoder:
            norms = {"attention_norm": "encoder_attn_layer_norm", "cross.norm": "final_layer_norm"}
        count, path = config.num_layers, "layers.{i}"
        return (
            super().names(config)
            | in_layers(count, path, norms)
            | first_norms(count, f"{path}.self_attn_layer_norm", "layer_norm")
        )
