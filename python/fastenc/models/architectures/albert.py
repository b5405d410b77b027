"""ALBERT: BERT with narrow embeddings and layers that share their weights. Source: Lan et al. 2019, arXiv:1909.11942.

There are G groups of weights (``num_hidden_groups``), each with the weights of one or several inner layers. A run of a
group computes its inner layers. ``num_hidden_layers`` in config.json is the number of runs L, and run i uses group
floor(i G / L). EncoderConfig.num_layers counts the inner layers of all runs.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from fastenc.models.architectures.bert import Bert
from fastenc.models.architectures.modules import HeadSpec
from fastenc.models.architectures.names import (
    BERT_CONFIG,
    BERT_EMBEDDINGS,
    Names,
    dropouts_in_layers,
    in_layers,
)
from fastenc.models.architectures.values import ConfigValues, Rule
from fastenc.nn.layer_dropout import LayerDropout

MOST_LAYERS = 1000


class Albert(Bert):
    name = "albert"
    class_prefix = "Albert"
    prefix = "albert"
    layers_path: ClassVar[str | None] = None  # one module computes several layers
    config_names = {
        **BERT_CONFIG,
        "embedding_size": "embedding_size",
        "classifier_dropout_p": "classifier_dropout_prob",
    }
    new_config = {
        "embedding_size": 128,
        "activation": "gelu_new",
        "hidden_dropout_p": 0.0,
        "attention_dropout_p": 0.0,
        "classifier_dropout_p": 0.1,
    }
    defaults = {"eps": 1e-12, "pad_token_id": 0, **new_config}
    lm_head = HeadSpec(
        {
            "dense": "predictions.dense",
            "norm": "predictions.LayerNorm",
            "decoder": "predictions.decoder",
            "bias": "predictions.bias",
        },
        activation=None,
    )
    pair_head = "sop_classifier.classifier"

    # The numbers of layers, groups and inner layers are not in the weights' names, so only this bounds them.
    rules = {
        key: Rule(
            f"a positive integer of at most {MOST_LAYERS}",
            lambda value: type(value) is int and 1 <= value <= MOST_LAYERS,
        )
        for key in ("num_hidden_layers", "num_hidden_groups", "inner_group_num")
    }

    def read(self, values: ConfigValues) -> ConfigValues:
        fields = super().read(values)
        fields["num_layers"] *= values.get("inner_group_num", 1)
        return fields

    def write(self, config) -> ConfigValues:
        written = super().write(config)
        written["num_hidden_layers"] //= config.extra.get("inner_group_num", 1)
        return written

    def embedding_projection(self, config) -> bool:
        return True  # even if the widths are equal

    def layer_dropout(self, config) -> LayerDropout:
        # transformers has a dropout module in its feed-forward layer but does not call it.
        return LayerDropout(config.attention_dropout_p, config.hidden_dropout_p)

    def live_pooled(self, model: Any, hidden: Tensor) -> Tensor:
        # In transformers this pooler is a linear layer without slicing and activation.
        return model.pooler_activation(model.pooler(hidden[:, 0]))

    def module_of_layer(self, config, number: int) -> int:
        inner = config.extra.get("inner_group_num", 1)
        runs = config.num_layers // inner
        groups = config.extra.get("num_hidden_groups", 1)
        # In floating point as in transformers, for a number of runs that the number of groups does not divide.
        group = int(number // inner / (runs / groups))
        return group * inner + number % inner

    def layer_modules(self, config) -> int:
        inner, groups = (
            config.extra.get(key, 1) for key in ("inner_group_num", "num_hidden_groups")
        )
        return groups * inner

    def names(self, config) -> Names:
        layer: Names = {
            "qkv": ("attention.query", "attention.key", "attention.value"),
            "attention_out": "attention.dense",
            "attention_norm": "attention.LayerNorm",
            "up": "ffn",
            "down": "ffn_output",
            "out_norm": "full_layer_layer_norm",
        }
        return {
            **BERT_EMBEDDINGS,
            "embeddings.projection": "encoder.embedding_hidden_mapping_in",
            **self._in_groups(config, lambda path: in_layers(1, path, layer)),
            "pooler": "pooler",
        }

    def dropout_names(self, config) -> dict[str, str]:
        names = {
            "attention": "attention.attention_dropout",
            "attention_out": "attention.output_dropout",
        }
        layers = self._in_groups(config, lambda path: dropouts_in_layers(1, path, names))
        return {"embeddings": "embeddings.dropout", **layers}

    def _in_groups(self, config, names_at: Callable[[str], ConfigValues]) -> ConfigValues:
        """The names for all modules that compute layers. ``names_at(path)`` gives those of one module."""
        inner = config.extra.get("inner_group_num", 1)
        paths = [
            f"encoder.albert_layer_groups.{i // inner}.albert_layers.{i % inner}"
            for i in range(self.layer_modules(config))
        ]
        return {
            name.replace("layers.0.", f"layers.{i}.", 1): theirs
            for i, path in enumerate(paths)
            for name, theirs in names_at(path).items()
        }
