"""MPNet: RoBERTa without token types and with a relative bias. Source: Song et al. 2020, arXiv:2004.09297.

The padding row of the position table and the number of buckets are constants in transformers' code.
"""

from fastenc.models.architectures.names import (
    BERT_CONFIG,
    BERT_EMBEDDINGS,
    Names,
    dropouts_in_layers,
    in_layers,
)
from fastenc.models.architectures.roberta import Roberta
from fastenc.nn.relative_bias import RelativeBiasSpec

PADDING_ROW = 1
UNUSED = ("type_vocab_size", "classifier_dropout_p")  # its heads use hidden_dropout_p


class MPNet(Roberta):
    name = "mpnet"
    class_prefix = "MPNet"
    prefix = "mpnet"
    config_names = {k: v for k, v in BERT_CONFIG.items() if k not in UNUSED}
    new_config = {"type_vocab_size": 0, "pad_token_id": 1, "position_offset": 2}
    has_token_types = False
    supported = {"relative_attention_num_buckets": 32}

    def padding_row(self, pad_token_id: int) -> int:
        return PADDING_ROW

    def relative_bias(self, config) -> RelativeBiasSpec:
        return RelativeBiasSpec(num_buckets=32, max_distance=128)

    def names(self, config) -> Names:
        layer: Names = {
            "qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
            "attention_out": "attention.attn.o",
            "attention_norm": "attention.LayerNorm",
            "up": "intermediate.dense",
            "down": "output.dense",
            "out_norm": "output.LayerNorm",
        }
        names = {
            **BERT_EMBEDDINGS,
            **in_layers(config.num_layers, "encoder.layer.{i}", layer),
            "relative_biases.0": "encoder.relative_attention_bias",
            "pooler": "pooler.dense",
        }
        del names["embeddings.token_type"]
        return names

    def dropout_names(self, config) -> dict[str, str]:
        names = {
            "attention": "attention.attn.dropout",
            "attention_out": "attention.dropout",
            "down": "output.dropout",
        }
        layers = dropouts_in_layers(config.num_layers, "encoder.layer.{i}", names)
        return {"embeddings": "embeddings.dropout", **layers}
