"""DistilBERT. Source: Sanh et al. 2019, arXiv:1910.01108.

It has no token types, no pooler, and no dropout on the attention sublayer's output.
"""

from fastenc.models.architectures.base import Architecture
from fastenc.models.architectures.modules import HeadSpec
from fastenc.models.architectures.names import BERT_EMBEDDINGS, Names, dropouts_in_layers, in_layers
from fastenc.models.architectures.values import PROBABILITY
from fastenc.nn.layer_dropout import LayerDropout


class DistilBert(Architecture):
    name = "distilbert"
    class_prefix = "DistilBert"
    prefix = "distilbert"
    layers_path = "transformer.layer"
    config_names = {
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_layers": "n_layers",
        "num_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "max_positions": "max_position_embeddings",
        "activation": "activation",
        "hidden_dropout_p": "dropout",
        "attention_dropout_p": "attention_dropout",
        "classifier_dropout_p": "seq_classif_dropout",
        "initializer_range": "initializer_range",
    }
    defaults = {"eps": 1e-12, "pad_token_id": 0, "classifier_dropout_p": 0.2}
    new_config = {"type_vocab_size": 0}
    has_pooler = False
    has_token_types = False
    lm_head = HeadSpec(
        {
            "dense": "vocab_transform",
            "norm": "vocab_layer_norm",
            "decoder": "vocab_projector",
            "bias": "vocab_projector.bias",
        },
        activation=None,
    )
    classifier = HeadSpec({"dense": "pre_classifier", "out": "classifier"}, activation="relu")
    question_answerer = HeadSpec({"out": "qa_outputs"})
    rules = {"qa_dropout": PROBABILITY}

    def layer_dropout(self, config) -> LayerDropout:
        return LayerDropout(config.attention_dropout_p, 0.0, 0.0, config.hidden_dropout_p)

    def token_classifier_dropout_p(self, config) -> float:
        return config.hidden_dropout_p  # classifier_dropout_p is for sequence classification only

    def question_answerer_dropout_p(self, config) -> float:
        return float(config.extra.get("qa_dropout", 0.1))

    def names(self, config) -> Names:
        layer: Names = {
            "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            "attention_out": "attention.out_lin",
            "attention_norm": "sa_layer_norm",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
            "out_norm": "output_layer_norm",
        }
        names = {**BERT_EMBEDDINGS, **in_layers(config.num_layers, "transformer.layer.{i}", layer)}
        del names["embeddings.token_type"]
        return names

    def dropout_names(self, config) -> dict[str, str]:
        names = {"attention": "attention.dropout", "down": "ffn.dropout"}
        layers = dropouts_in_layers(config.num_layers, "transformer.layer.{i}", names)
        return {"embeddings": "embeddings.dropout", **layers}
