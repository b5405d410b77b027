"""EuroBERT: a bidirectional encoder with LLaMA's layers. Source: Boizard et al. 2025, arXiv:2503.05500.

The layers are pre-norm with RMSNorm, SwiGLU and rotary positions. The masked-LM head is a decoder alone.
"""

from dataclasses import replace
from typing import ClassVar

from fastenc.models.architectures.base import Architecture
from fastenc.models.architectures.modules import Biases, HeadSpec
from fastenc.models.architectures.names import BERT_CONFIG, Names, first_norms, in_layers
from fastenc.models.architectures.rotary import read_rotary, read_scaling
from fastenc.models.architectures.values import COUNT, POSITIVE, SWITCH, TABLE, ConfigValues, one_of
from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.layer_spec import AttentionSpec, FeedForwardSpec, LayerSpec, NormSpec
from fastenc.nn.rotary import RotarySpec
from fastenc.ops.activation import ACTIVATIONS

LLAMA_CONFIG = {
    **{
        ours: theirs
        for ours, theirs in BERT_CONFIG.items()
        if ours not in ("type_vocab_size", "hidden_dropout_p", "classifier_dropout_p")
    },
    "eps": "rms_norm_eps",
    "head_dim": "head_dim",
    "attention_dropout_p": "attention_dropout",
}


class EuroBert(Architecture):
    name = "eurobert"
    class_prefix = "EuroBert"
    prefix = "model"
    layers_path = "layers"
    config_names = LLAMA_CONFIG
    defaults = {
        "eps": 1e-5,
        "pad_token_id": 128001,
        "activation": "silu",
        "head_dim": 0,
        "max_positions": 8192,
        "attention_dropout_p": 0.0,
        "hidden_dropout_p": 0.0,
        "classifier_dropout_p": 0.0,
    }
    new_config = {"type_vocab_size": 0, "eps": 1e-5, "max_positions": 8192, "activation": "silu"}
    has_pooler = False
    has_token_types = False
    theta = 10_000.0
    lm_head: ClassVar[HeadSpec | None] = HeadSpec({"decoder": "lm_head", "bias": "lm_head.bias"})
    classifier: ClassVar[HeadSpec | None] = HeadSpec(
        {"dense": "dense", "out": "classifier"}, dropout_after=False
    )
    token_classifier: ClassVar[HeadSpec | None] = HeadSpec(
        {"out": "classifier"}, dropout_after=False
    )
    question_answerer: ClassVar[HeadSpec | None] = None
    supported = {}
    rules = {
        "num_key_value_heads": COUNT.or_none(),
        "rope_parameters": TABLE,
        "rope_scaling": TABLE,
        "rope_theta": POSITIVE,
        "attention_bias": SWITCH,
        "mlp_bias": SWITCH,
        "classifier_pooling": one_of(("bos", "mean", "late")),
    }

    def check_values(self, values: ConfigValues) -> None:
        # LLaMA's files give null for a value that follows from others.
        super().check_values({key: value for key, value in values.items() if value is not None})

    def check_supported(self, values: ConfigValues) -> None:
        super().check_supported(values)
        heads, key_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
        if heads and key_heads and heads % key_heads:
            raise ValueError(
                f"config.json: num_key_value_heads must divide num_attention_heads, got {key_heads} and {heads}: is "
                "the file damaged?"
            )
        self.check_rotary(values)

    def check_rotary(self, values: ConfigValues) -> None:
        """Raise ValueError for rotary angles that are not supported."""
        read_scaling(_rope(values), self.defaults["max_positions"])

    def normalize_config(self, values: ConfigValues) -> ConfigValues:
        # A file that says nothing of it has an untied decoder.
        return {"tie_word_embeddings": False, **values}

    def new_extra(self, max_positions: int) -> ConfigValues:
        return {"tie_word_embeddings": False}

    def read(self, values: ConfigValues) -> ConfigValues:
        return super().read({key: value for key, value in values.items() if value is not None})

    def layer(self, config, number: int) -> LayerSpec:
        norm, heads = NormSpec("rms", config.eps), config.num_heads
        key_heads = config.extra.get("num_key_value_heads") or heads
        scale = config.head_dim**-0.5
        attention = AttentionSpec(heads, config.head_dim, scale)
        if key_heads != heads:
            attention = replace(attention, key_heads=key_heads)
        return LayerSpec(
            attention,
            FeedForwardSpec(config.intermediate_size, ACTIVATIONS[config.activation], gated=True),
            norm,
            norm,
            pre_norm=True,
        )

    def layer_dropout(self, config) -> LayerDropout:
        return LayerDropout(config.attention_dropout_p)

    def embedding_dropout_p(self, config) -> float:
        return 0.0

    def biases(self, config) -> Biases:
        attention, mlp = (
            bool(config.extra.get(key, False)) for key in ("attention_bias", "mlp_bias")
        )
        return Biases(attention, attention, mlp, mlp, norm=False)

    def rotary(self, config, number: int) -> RotarySpec:
        theta = config.extra.get("rope_theta") or self.theta
        return read_rotary(_rope(config.extra), config.head_dim, theta, config.max_positions)

    def first_norm(self, config) -> bool:
        return True

    def embedding_norm(self, config) -> None:
        return None

    def position_table(self, config) -> bool:
        return False

    def decoder_bias(self, config) -> bool:
        return self.biases(config).up

    def classifier_pooling(self, config) -> str:
        pooling = config.extra.get("classifier_pooling", "late")
        return "cls" if pooling == "bos" else pooling

    def token_classifier_dropout_p(self, config) -> float:
        return 0.0

    def names(self, config) -> Names:
        layer: Names = {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention_out": "self_attn.o_proj",
            "attention_norm": "post_attention_layernorm",
            "up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": "mlp.down_proj",
        }
        return {
            "embeddings.word": "embed_tokens",
            **in_layers(config.num_layers, "layers.{i}", layer),
            **first_norms(config.num_layers, "layers.{i}.input_layernorm", "norm"),
        }


def _rope(values: ConfigValues) -> ConfigValues:
    return values.get("rope_parameters") or values.get("rope_scaling") or {}
