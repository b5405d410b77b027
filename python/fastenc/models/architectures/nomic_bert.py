"""NomicBERT: BERT with rotary positions and SwiGLU, without biases in its linear layers.

Source: Nussbaum et al. 2024, arXiv:2402.01613. Checkpoints of the hub's remote code (``n_embd``, ``attn.Wqkv``,
``mlp.fc11``) are read too; checkpoints are written in transformers' names. The version with a mixture of experts is not
supported.
"""

from typing import ClassVar

from torch import Tensor

from fastenc.models.architectures.base import Architecture
from fastenc.models.architectures.modules import Biases, HeadSpec
from fastenc.models.architectures.names import (
    BERT_CONFIG,
    BERT_EMBEDDINGS,
    QKV,
    Names,
    dropouts_in_layers,
    in_layers,
    renamed_in_layer,
)
from fastenc.models.architectures.rotary import read_rotary, read_scaling
from fastenc.models.architectures.values import POSITIVE, ROPE, TABLE, ConfigValues
from fastenc.nn.layer_spec import AttentionSpec, FeedForwardSpec, LayerSpec, NormSpec
from fastenc.nn.rotary import RotarySpec
from fastenc.ops.activation import ACTIVATIONS

# The remote code's names of configuration values → transformers'.
HUB_CONFIG = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
}
# The remote code's names in a layer → transformers'.
HUB_LAYER: Names = {
    "attn.Wqkv": QKV,
    "attn.out_proj": "self_attn.o_proj",
    "mlp.fc11": "mlp.up_proj",
    "mlp.fc12": "mlp.gate_proj",
    "mlp.fc2": "mlp.down_proj",
    "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
}


class NomicBert(Architecture):
    name = "nomic_bert"
    class_prefix = "NomicBert"
    prefix = "nomic_bert"
    layers_path = "layers"
    config_names = {**BERT_CONFIG, "head_dim": "head_dim"}
    defaults = {
        "eps": 1e-12,
        "pad_token_id": 0,
        "activation": "silu",
        "head_dim": 0,
        "hidden_dropout_p": 0.0,
        "attention_dropout_p": 0.0,
        "max_positions": 2048,
    }
    new_config = {"activation": "silu"}
    has_pooler = False  # only the classification head has one
    theta = 1000.0
    lm_head = HeadSpec(
        {
            "dense": "cls.predictions.transform.dense",
            "norm": "cls.predictions.transform.layer_norm",
            "decoder": "cls.predictions.decoder",
            "bias": "cls.predictions.bias",
        },
        activation=None,
    )
    classifier = HeadSpec({"out": "classifier"}, pooler=True)
    question_answerer: ClassVar[HeadSpec | None] = None
    # Switches of the remote code, which have these values in all dense models of the family.
    supported = Architecture.supported | {
        "activation_function": "swiglu",
        "prenorm": False,
        "use_rms_norm": False,
        "causal": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
    }

    rules = {
        "rope_parameters": TABLE,
        "rope_scaling": TABLE,
        "rope_theta": POSITIVE,
        "partial_rotary_factor": ROPE["partial_rotary_factor"],
        "original_max_position_embeddings": ROPE["original_max_position_embeddings"],
    }

    def check_values(self, values: ConfigValues) -> None:
        # The remote code's files give null for values that they leave out.
        super().check_values({key: value for key, value in values.items() if value is not None})

    def check_supported(self, values: ConfigValues) -> None:
        super().check_supported(values)
        if values.get("num_experts") or values.get("moe_every_n_layers"):
            raise ValueError(
                "config.json must describe a dense model, got a mixture of experts: take another model, such as "
                "nomic-embed-text-v1.5"
            )
        read_scaling(_rope(values), self.defaults["max_positions"])

    def read(self, values: ConfigValues) -> ConfigValues:
        return super().read({key: value for key, value in values.items() if value is not None})

    def normalize_config(self, values: ConfigValues) -> ConfigValues:
        if "n_embd" not in values:
            return values
        renamed = {HUB_CONFIG.get(key, key): value for key, value in values.items()}
        renamed.pop("auto_map", None)  # otherwise transformers would ask for the remote code
        rope = {"rope_type": "default", "rope_theta": renamed.pop("rotary_emb_base", self.theta)}
        if renamed.get("rotary_scaling_factor"):
            # For texts longer than the pretraining length the angles are those of transformers' "dynamic".
            rope |= {"rope_type": "dynamic", "factor": renamed.pop("rotary_scaling_factor")}
            renamed["max_position_embeddings"] = renamed.get("max_trained_positions", 2048)
        return {**renamed, "rope_parameters": rope}

    def layer(self, config, number: int) -> LayerSpec:
        norm = NormSpec("layer", config.eps)
        activation = ACTIVATIONS[config.activation]
        return LayerSpec(
            AttentionSpec(config.num_heads, config.head_dim, config.head_dim**-0.5),
            FeedForwardSpec(config.intermediate_size, activation, gated=True),
            norm,
            norm,
        )

    def biases(self, config) -> Biases:
        return Biases(qkv=False, attention_out=False, up=False, down=False)

    def rotary(self, config, number: int) -> RotarySpec:
        theta = config.extra.get("rope_theta") or self.theta
        return read_rotary(_rope(config.extra), config.head_dim, theta, config.max_positions)

    def position_table(self, config) -> bool:
        return False

    def dropout_names(self, config) -> dict[str, str]:
        names = {"attention_out": "post_attention_dropout", "down": "post_mlp_dropout"}
        return {
            "embeddings": "embeddings.dropout",
            **dropouts_in_layers(config.num_layers, "layers.{i}", names),
        }

    def names(self, config) -> Names:
        layer: Names = {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention_out": "self_attn.o_proj",
            "attention_norm": "post_attention_layernorm",
            "up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": "mlp.down_proj",
            "out_norm": "post_mlp_layernorm",
        }
        names = {**BERT_EMBEDDINGS, **in_layers(config.num_layers, "layers.{i}", layer)}
        del names["embeddings.position"]
        return {**names, "pooler": "pooler.dense"}

    def renamed(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        name = name.removeprefix("bert.").removeprefix("encoder.")
        name = name.replace("emb_ln.", "embeddings.LayerNorm.")
        return renamed_in_layer(name, tensor, HUB_LAYER)


def _rope(values: ConfigValues) -> ConfigValues:
    """The rope_parameters. As in transformers, the values beside them complete them or have precedence."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    beside = lambda key: {key: values[key]} if values.get(key) is not None else {}
    return {
        **beside("partial_rotary_factor"),
        **given,
        **beside("original_max_position_embeddings"),
    }
