"""GTE's "new" encoders: NomicBERT's layers with GeGLU and biases. Source: Zhang et al. 2024, arXiv:2407.19669.

Checkpoints of the hub's remote code (model_type "new", in snowflake-arctic-embed-m-v2.0 "gte") have
``attention.qkv_proj``, ``mlp.up_gate_proj``, whose second half gets the activation, and rotary angles with "NTK"
scaling, which does not depend on the text's length.
"""

from torch import Tensor

from fastenc.models.architectures.modules import Biases, HeadSpec
from fastenc.models.architectures.names import (
    BERT_CONFIG,
    QKV,
    Names,
    dropouts_in_layers,
    renamed_in_layer,
)
from fastenc.models.architectures.nomic_bert import NomicBert
from fastenc.models.architectures.values import COUNT, POSITIVE, TABLE, ConfigValues, check
from fastenc.nn.layer_dropout import LayerDropout

# The remote code's names in a layer → transformers'.
HUB_LAYER: Names = {
    "attention.qkv_proj": QKV,
    "attention.o_proj": "self_attn.o_proj",
    "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj"),
    "attn_ln": "post_attention_layernorm",
    "mlp_ln": "post_mlp_layernorm",
}


class Gte(NomicBert):
    name = "gte"
    class_prefix = "Gte"
    remote_name = "new"
    prefix = "gte"
    config_names = BERT_CONFIG
    defaults = {
        "eps": 1e-12,
        "pad_token_id": 1,
        "activation": "gelu",
        "hidden_dropout_p": 0.1,
        "attention_dropout_p": 0.0,
        "max_positions": 8192,
    }
    new_config = {"type_vocab_size": 1, "pad_token_id": 1}
    # Switches of the remote code, which transformers keeps in the configuration of a loaded model.
    supported = NomicBert.supported | {
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
    }
    theta = 160_000.0
    lm_head = HeadSpec(
        {
            "dense": "lm_head.dense",
            "norm": "lm_head.layer_norm",
            "decoder": "lm_head.decoder",
            "bias": "lm_head.decoder.bias",
        }
    )

    def normalize_config(self, values: ConfigValues) -> ConfigValues:
        if values["model_type"] == self.name and "rope_theta" not in values:
            return values
        dropped = ("rope_theta", "rope_scaling", "auto_map")
        kept = {key: value for key, value in values.items() if key not in dropped}
        names = [name.removeprefix("New") for name in values.get("architectures") or []]
        return {
            **kept,
            "model_type": self.name,
            "architectures": [self.class_prefix + name for name in names],
            "rope_parameters": _rope_parameters(values),
        }

    def layer_dropout(self, config) -> LayerDropout:
        p = config.hidden_dropout_p
        return LayerDropout(config.attention_dropout_p, p, p, p)

    def biases(self, config) -> Biases:
        return Biases(up=False)

    def dropout_names(self, config) -> dict[str, str]:
        inner = dropouts_in_layers(config.num_layers, "layers.{i}", {"inner": "mlp.dropout"})
        return {**super().dropout_names(config), **inner}

    def renamed(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        name = name.removeprefix("new.").replace("encoder.layer.", "layers.")
        name = name.replace("lm_head.norm.", "lm_head.layer_norm.")
        return renamed_in_layer(name, tensor, HUB_LAYER)


def _rope_parameters(values: ConfigValues) -> ConfigValues:
    """transformers' rope_parameters for the remote code's rotary angles.

    Its "ntk" scaling with factor k has the frequencies 1 / ((k theta)^(2i/dim) k^(2/dim)). That is linear scaling by
    k^(2/dim) with the base k theta. Source: Su 2023, https://kexue.fm/archives/9706, equation 6.
    """
    sizes = {"hidden_size": COUNT, "num_attention_heads": COUNT}
    check(values, {"rope_theta": POSITIVE, "rope_scaling": TABLE, **sizes}, "config.json: ")
    theta, scaling = float(values.get("rope_theta", 10_000.0)), values.get("rope_scaling")
    if not scaling:
        return {"rope_type": "default", "rope_theta": theta}
    if scaling.get("type") != "ntk" or scaling.get("mixed_b") is not None:
        raise ValueError(
            f"config.json: rope_scaling must be of type 'ntk' without mixed_b, got {scaling!r}: take the "
            "remote code for this model"
        )
    check({"factor": None, **scaling}, {"factor": POSITIVE}, "config.json: rope_scaling's ")
    missing = [name for name in sizes if name not in values]
    if missing:
        raise ValueError(f"config.json must give {', '.join(missing)}: is the file complete?")
    dim = max(1, values["hidden_size"] // values["num_attention_heads"])
    k = float(scaling["factor"])
    return {"rope_type": "linear", "factor": k ** (2 / dim), "rope_theta": k * theta}
