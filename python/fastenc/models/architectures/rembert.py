"""RemBERT: BERT with narrow embeddings, and a wide decoder that has a weight of its own.

Source: Chung et al. 2020, arXiv:2010.12821.
"""

from fastenc.models.architectures.bert import Bert
from fastenc.models.architectures.modules import HeadSpec
from fastenc.models.architectures.names import BERT_CONFIG, Names
from fastenc.models.architectures.values import COUNT, ConfigValues


class RemBert(Bert):
    name = "rembert"
    class_prefix = "RemBert"
    prefix = "rembert"
    config_names = {
        **BERT_CONFIG,
        "embedding_size": "input_embedding_size",
        "classifier_dropout_p": "classifier_dropout_prob",
    }
    new_config = {
        "embedding_size": 256,
        "hidden_dropout_p": 0.0,
        "attention_dropout_p": 0.0,
        "classifier_dropout_p": 0.1,
    }
    defaults = {"eps": 1e-12, "pad_token_id": 0, **new_config}
    lm_head = HeadSpec(
        {
            "dense": "cls.predictions.dense",
            "norm": "cls.predictions.LayerNorm",
            "decoder": "cls.predictions.decoder",
            "bias": "cls.predictions.decoder.bias",
        },
        activation=None,
    )
    pair_head = None
    # Tied to the embeddings, the decoder would have another width than its input.
    supported = {**Bert.supported, "tie_word_embeddings": False}
    rules = {"output_embedding_size": COUNT}

    def normalize_config(self, values: ConfigValues) -> ConfigValues:
        return {"tie_word_embeddings": False, **values}

    def new_extra(self, max_positions: int) -> ConfigValues:
        return {"tie_word_embeddings": False}

    def embedding_projection(self, config) -> bool:
        return True  # even if the widths are equal

    def decoder_width(self, config) -> int:
        return config.extra.get("output_embedding_size", 1664)

    def names(self, config) -> Names:
        projection = {"embeddings.projection": "encoder.embedding_hidden_mapping_in"}
        return {**super().names(config), **projection}
