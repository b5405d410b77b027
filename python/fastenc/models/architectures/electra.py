"""ELECTRA: BERT whose embeddings may be narrower than the layers. Source: Clark et al. 2020, arXiv:2003.10555."""

from typing import ClassVar

from fastenc.models.architectures.base import Architecture
from fastenc.models.architectures.bert import BERT_DROPOUTS, BERT_LAYER
from fastenc.models.architectures.modules import HeadSpec
from fastenc.models.architectures.names import (
    BERT_CONFIG,
    BERT_EMBEDDINGS,
    Names,
    dropouts_in_layers,
    in_layers,
)


class Electra(Architecture):
    name = "electra"
    class_prefix = "Electra"
    prefix = "electra"
    layers_path = "encoder.layer"
    config_names = {**BERT_CONFIG, "embedding_size": "embedding_size"}
    has_pooler = False
    lm_head = HeadSpec(
        {
            "dense": "generator_predictions.dense",
            "norm": "generator_predictions.LayerNorm",
            "decoder": "generator_lm_head",
            "bias": "generator_lm_head.bias",
        }
    )
    detector: ClassVar[HeadSpec | None] = HeadSpec(
        {
            "dense": "discriminator_predictions.dense",
            "out": "discriminator_predictions.dense_prediction",
        },
        activation=None,
    )
    classifier = HeadSpec(
        {"dense": "classifier.dense", "out": "classifier.out_proj"},
        activation="gelu",
        dropout_before=True,
    )

    def names(self, config) -> Names:
        layers = in_layers(config.num_layers, "encoder.layer.{i}", BERT_LAYER)
        return {**BERT_EMBEDDINGS, "embeddings.projection": "embeddings_project", **layers}

    def dropout_names(self, config) -> dict[str, str]:
        layers = dropouts_in_layers(config.num_layers, "encoder.layer.{i}", BERT_DROPOUTS)
        return {"embeddings": "embeddings.dropout", **layers}
