"""ESM C, an encoder of proteins with EuroBERT's layers and LayerNorm.

Source: ESM Team 2024, "ESM Cambrian: Revealing the mysteries of proteins with unsupervised learning".

A LayerNorm of all heads' queries, and one of the keys, precede the rotation. A layer adds a sublayer's output divided
by s = sqrt(L / 36), where L is the number of layers:

    x + f(Norm(x)) / s  =  (s x + f(Norm(x))) / s

LayerNorm(x, eps) = LayerNorm(s x, s^2 eps). So the layers here add without a division. Their residual sums are s times
the model's states.
"""

import math
from dataclasses import replace

from fastenc.models.architectures.eurobert import LLAMA_CONFIG, EuroBert
from fastenc.models.architectures.modules import Biases, HeadSpec
from fastenc.models.architectures.names import Names, query_key_norms
from fastenc.nn.layer_spec import LayerSpec, NormSpec

REFERENCE_LAYERS = 36


class Esmc(EuroBert):
    name = "esmc"
    class_prefix = "Esmc"
    prefix = "esmc"
    config_names = {ours: theirs for ours, theirs in LLAMA_CONFIG.items() if ours != "eps"} | {
        "classifier_dropout_p": "classifier_dropout"
    }
    defaults = EuroBert.defaults | {
        "pad_token_id": 1,
        "max_positions": 2048,
        "classifier_dropout_p": 0.1,
    }
    new_config = EuroBert.new_config | {"max_positions": 2048}
    lm_head = HeadSpec(
        {
            "dense": "lm_head.dense",
            "norm": "lm_head.layer_norm",
            "decoder": "lm_head.decoder",
            "bias": "lm_head.decoder.bias",
        }
    )
    classifier = HeadSpec(
        {"dense": "classifier.dense", "out": "classifier.out_proj"},
        activation="tanh",
        dropout_before=True,
    )
    token_classifier = HeadSpec({"out": "score"})
    supported = {"tie_word_embeddings": False}
    rules = {
        key: rule
        for key, rule in EuroBert.rules.items()
        if key not in ("num_key_value_heads", "classifier_pooling")
    }

    def takes_inputs_embeds(self, config) -> bool:
        return False

    def layer(self, config, number: int) -> LayerSpec:
        spec = super().layer(config, number)
        norm = NormSpec("layer", self.residual_factor(config) ** 2 * config.eps)
        attention = replace(
            spec.attention, head_norm_eps=config.eps, normalises_heads_together=True
        )
        return replace(spec, attention=attention, attention_norm=norm, out_norm=norm)

    def residual_factor(self, config) -> float:
        return math.sqrt(config.num_layers / REFERENCE_LAYERS)

    def embedding_scale(self, config) -> float:
        return self.residual_factor(config)

    def biases(self, config) -> Biases:
        return replace(super().biases(config), norm=True, last_norm=False)

    def decoder_bias(self, config) -> bool:
        return True

    def classifier_pooling(self, config) -> str:
        return "cls"

    def token_classifier_dropout_p(self, config) -> float:
        return config.classifier_dropout_p or 0.0

    def names(self, config) -> Names:
        return super().names(config) | query_key_norms(config.num_layers)
