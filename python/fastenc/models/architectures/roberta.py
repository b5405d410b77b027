"""RoBERTa, and models with its architecture under other names. Source: Liu et al. 2019, arXiv:1907.11692.

A sequence's first token takes the row of the position table after the padding token's id.
"""

from dataclasses import replace

from fastenc.models.architectures.bert import Bert
from fastenc.models.architectures.modules import HeadSpec
from fastenc.models.architectures.names import Names, first_norms, in_layers
from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.layer_spec import LayerSpec


class Roberta(Bert):
    name = "roberta"
    class_prefix = "Roberta"
    prefix = "roberta"
    defaults = {"eps": 1e-12, "pad_token_id": 1}
    new_config = {"type_vocab_size": 1, "pad_token_id": 1, "position_offset": 2}
    positions_after_padding = True
    lm_head = HeadSpec(
        {
            "dense": "lm_head.dense",
            "norm": "lm_head.layer_norm",
            "decoder": "lm_head.decoder",
            "bias": "lm_head.bias",
        }
    )
    classifier = HeadSpec(
        {"dense": "classifier.dense", "out": "classifier.out_proj"},
        activation="tanh",
        dropout_before=True,
    )
    pair_head = None


class XlmRoberta(Roberta):
    name = "xlm-roberta"
    class_prefix = "XLMRoberta"


class XlmRobertaXL(Roberta):
    """XLM-RoBERTa with pre-norm layers: no norm after the embeddings, one after the last layer.

    Source: Goyal et al. 2021, arXiv:2105.00572.
    """

    name = "xlm-roberta-xl"
    class_prefix = "XLMRobertaXL"

    def layer(self, config, number: int) -> LayerSpec:
        return replace(super().layer(config, number), pre_norm=True)

    def layer_dropout(self, config) -> LayerDropout:
        return LayerDropout(config.attention_dropout_p, config.hidden_dropout_p)

    def first_norm(self, config) -> bool:
        return True

    def embedding_norm(self, config) -> None:
        return None

    def names(self, config) -> Names:
        names = super().names(config)
        del names["embeddings.norm"]
        path = "encoder.layer.{i}"
        norms = in_layers(config.num_layers, path, {"attention_norm": "LayerNorm"})
        first = f"{path}.attention.self_attn_layer_norm"
        return names | norms | first_norms(config.num_layers, first, "encoder.LayerNorm")

    def dropout_names(self, config) -> dict[str, str]:
        names = super().dropout_names(config)
        # There is no dropout after the feed-forward sublayer.
        return {name: path for name, path in names.items() if not name.endswith(".down")}


class Camembert(Roberta):
    name = "camembert"
    class_prefix = "Camembert"


class Data2VecText(Roberta):
    name = "data2vec-text"
    class_prefix = "Data2VecText"
    prefix = "data2vec_text"
