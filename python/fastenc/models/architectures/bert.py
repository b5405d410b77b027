"""BERT. Source: Devlin et al. 2018, arXiv:1810.04805."""

from typing import ClassVar

from fastenc.models.architectures.base import Architecture
from fastenc.models.architectures.modules import HeadSpec
from fastenc.models.architectures.names import BERT_EMBEDDINGS, Names, dropouts_in_layers, in_layers

BERT_LAYER: Names = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "out_norm": "output.LayerNorm",
}
BERT_DROPOUTS = {
    "attention": "attention.self.dropout",
    "attention_out": "attention.output.dropout",
    "down": "output.dropout",
}


class Bert(Architecture):
    name = "bert"
    class_prefix = "Bert"
    prefix = "bert"
    layers_path: ClassVar[str | None] = "encoder.layer"
    lm_head = HeadSpec(
        {
            "dense": "cls.predictions.transform.dense",
            "norm": "cls.predictions.transform.LayerNorm",
            "decoder": "cls.predictions.decoder",
            "bias": "cls.predictions.bias",
        },
        activation=None,
    )
    classifier = HeadSpec({"out": "classifier"}, pooler=True)
    pair_head: ClassVar[str | None] = "cls.seq_relationship"

    def names(self, config) -> Names:
        layers = in_layers(config.num_layers, "encoder.layer.{i}", BERT_LAYER)
        return {**BERT_EMBEDDINGS, **layers, "pooler": "pooler.dense"}

    def dropout_names(self, config) -> dict[str, str]:
        layers = dropouts_in_layers(config.num_layers, "encoder.layer.{i}", BERT_DROPOUTS)
        return {"embeddings": "embeddings.dropout", **layers}
