"""DeBERTa's first version.

It differs from the second in the layout of attention's weights: one matrix with q, k and v of each head next to one
another, biases of q and v alone, and the positions' own projections. Every distance has its own embedding.
Source: He et al. 2020, arXiv:2006.03654.
"""

from dataclasses import replace

from fastenc.models.architectures.base import Architecture
from fastenc.models.architectures.bert import BERT_LAYER
from fastenc.models.architectures.deberta_v2 import DebertaV2, max_distance
from fastenc.models.architectures.modules import Biases, PositionModules
from fastenc.models.architectures.names import BERT_CONFIG, Names
from fastenc.models.architectures.values import ConfigValues
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.relative_positions import RelativePositionSpec


class Deberta(DebertaV2):
    name = "deberta"
    class_prefix = "Deberta"
    config_names = {
        **BERT_CONFIG,
        "embedding_size": "embedding_size",
        "classifier_dropout_p": "cls_dropout",
    }
    new_config = DebertaV2.new_config | {"vocab_size": 50265}
    supported = {**Architecture.supported, "talking_head": False}
    rules = {
        key: rule
        for key, rule in DebertaV2.rules.items()
        if not key.startswith(("conv_", "position_buckets", "norm_", "share_", "attention_head_"))
    }

    def read(self, values: ConfigValues) -> ConfigValues:
        return {**super().read(values), "head_dim": 0}

    def new_extra(self, max_positions: int) -> ConfigValues:
        """Those of deberta-base."""
        return {
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_biased_input": False,
        }

    def layer(self, config, number: int) -> LayerSpec:
        spec = super().layer(config, number)
        return replace(spec, attention=replace(spec.attention, interleaved=True))

    def _counted_terms(self, config) -> int:
        # All that are named, also those that add nothing.
        return len(self._given_terms(config))

    def biases(self, config) -> Biases:
        return Biases(key=False)

    def _table(self, config) -> RelativePositionSpec:
        return RelativePositionSpec(0, max_distance(config.extra, config.max_positions))

    def position_modules(self, config) -> PositionModules:
        rows = self._table(config).rows if config.extra.get("relative_attention") else 0
        return PositionModules(rows, False, self.terms(config))

    def convolution(self, config) -> None:
        return None

    def _layer_names(self, config) -> Names:
        attention = "attention.self"
        names: Names = {
            **BERT_LAYER,
            "qkv": f"{attention}.in_proj",
            "query_bias": f"{attention}.q_bias",
            "value_bias": f"{attention}.v_bias",
        }
        terms = self.terms(config)
        if "c2p" in terms:
            names["position_key"] = f"{attention}.pos_proj"
        if "p2c" in terms:
            names["position_query"] = f"{attention}.pos_q_proj"
        return names
