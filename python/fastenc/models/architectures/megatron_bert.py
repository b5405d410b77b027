"""MegatronBERT: BERT in pre-norm, without a norm after the embeddings.

Source: Shoeybi et al. 2019, arXiv:1909.08053.
"""

from dataclasses import replace

from fastenc.models.architectures.bert import Bert
from fastenc.models.architectures.names import BERT_CONFIG, Names, first_norms, in_layers
from fastenc.nn.layer_spec import LayerSpec


class MegatronBert(Bert):
    name = "megatron-bert"
    class_prefix = "MegatronBert"
    # The heads have the layers' dropout.
    config_names = {
        ours: theirs for ours, theirs in BERT_CONFIG.items() if ours != "classifier_dropout_p"
    }

    def layer(self, config, number: int) -> LayerSpec:
        return replace(super().layer(config, number), pre_norm=True)

    def first_norm(self, config) -> bool:
        return True

    def embedding_norm(self, config) -> None:
        return None

    def names(self, config) -> Names:
        names = super().names(config)
        del names["embeddings.norm"]
        norms = in_layers(config.num_layers, "encoder.layer.{i}", {"attention_norm": "ln"})
        return (
            names
            | norms
            | first_norms(config.num_layers, "encoder.layer.{i}.attention.ln", "encoder.ln")
        )
