"""DeBERTa's second and third versions, and mDeBERTa.

Attention compares content with relative positions ("c2p" and "p2c"), whose embeddings all layers share.
Sources: He et al. 2020, arXiv:2006.03654; He et al. 2021, arXiv:2111.09543.
"""

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from fastenc.models.architectures.base import Architecture
from fastenc.models.architectures.bert import BERT_DROPOUTS, BERT_LAYER
from fastenc.models.architectures.modules import HeadSpec, PositionModules
from fastenc.models.architectures.names import (
    BERT_CONFIG,
    BERT_EMBEDDINGS,
    Names,
    dropouts_in_layers,
    in_layers,
)
from fastenc.models.architectures.values import (
    AT_LEAST_0,
    COUNT,
    PROBABILITY,
    SWITCH,
    TEXT,
    ConfigValues,
    Rule,
    integer,
)
from fastenc.nn.convolution import ConvolutionSpec
from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.layer_spec import LayerSpec, NormSpec
from fastenc.nn.relative_positions import RelativePositionSpec
from fastenc.ops.activation import ACTIVATIONS

TERMS = ("c2p", "p2c")
LEGACY_HEAD = {
    "dense": "cls.predictions.transform.dense",
    "norm": "cls.predictions.transform.LayerNorm",
    "decoder": "cls.predictions.decoder",
    "bias": "cls.predictions.bias",
}
# transformers' "legacy: false", which has the names of the original files of version 3.
HEAD = {
    "dense": "lm_predictions.lm_head.dense",
    "norm": "lm_predictions.lm_head.LayerNorm",
    "bias": "lm_predictions.lm_head.bias",
}
WITH_TANH = Rule(
    f"one of {sorted((*ACTIVATIONS, 'tanh'))}",
    lambda value: isinstance(value, str) and value in (*ACTIVATIONS, "tanh"),
)


class DebertaV2(Architecture):
    name = "deberta-v2"
    class_prefix = "DebertaV2"
    prefix = "deberta"
    layers_path = "encoder.layer"
    config_names = {
        **BERT_CONFIG,
        "embedding_size": "embedding_size",
        "classifier_dropout_p": "cls_dropout",
    }
    defaults = {"eps": 1e-7, "pad_token_id": 0, "type_vocab_size": 0}
    embeds_padding = False  # embeddings are multiplied by the mask
    new_config = {"type_vocab_size": 0, "eps": 1e-7, "vocab_size": 128100}
    has_pooler = False
    # The enhanced mask decoder's. transformers does not read them either.
    unread = ("embeddings.position_embeddings.",)
    lm_head = HeadSpec(LEGACY_HEAD, activation=None)
    # By the names of version 3's files. transformers has no class for it.
    detector: ClassVar[HeadSpec | None] = HeadSpec(
        {
            "norm": "mask_predictions.LayerNorm",
            "dense": "mask_predictions.dense",
            "out": "mask_predictions.classifier",
        },
        activation=None,
    )
    classifier = HeadSpec({"dense": "pooler.dense", "out": "classifier"}, dropout_before=True)
    rules = {
        "relative_attention": SWITCH,
        "position_biased_input": SWITCH,
        "share_att_key": SWITCH,
        "legacy": SWITCH,
        "position_buckets": Rule(
            "an even integer, or at most 0 for none",
            lambda value: type(value) is int and (value <= 0 or value % 2 == 0),
        ),
        "max_relative_positions": integer("an integer", -1),
        "pos_att_type": Rule(
            "a text or a list of texts",
            lambda value: (
                isinstance(value, str)
                or (isinstance(value, list) and all(isinstance(each, str) for each in value))
            ),
        ).or_none(),
        "norm_rel_ebd": TEXT,
        "conv_kernel_size": Rule(
            "0 or an odd integer",
            lambda value: type(value) is int and (value == 0 or (value > 0 and value % 2 == 1)),
        ),
        "conv_groups": COUNT,
        "conv_act": WITH_TANH,
        "pooler_dropout": PROBABILITY,
        "pooler_hidden_act": WITH_TANH,
        "pooler_hidden_size": AT_LEAST_0,
        "attention_head_size": COUNT,
    }

    def check_supported(self, values: ConfigValues) -> None:
        super().check_supported(values)
        width = values.get("hidden_size")
        if values.get("pooler_hidden_size", width) != width:
            raise ValueError(
                f"config.json: pooler_hidden_size must be hidden_size {width}, got {values['pooler_hidden_size']}: "
                "this variant of the architecture is not supported"
            )
        buckets, groups = values.get("position_buckets", -1), values.get("conv_groups", 1)
        if values.get("relative_attention") and buckets > 0:
            farthest = max_distance(values, values.get("max_position_embeddings", 512))
            if farthest - 1 <= buckets // 2:
                raise ValueError(
                    "config.json: max_relative_positions must be more than half of position_buckets and 1, got "
                    f"{farthest} and {buckets}: is the file damaged?"
                )
        if values.get("conv_kernel_size", 0) and width is not None and width % groups:
            raise ValueError(
                f"config.json: conv_groups must divide hidden_size {width}, got {groups}: is the file damaged?"
            )

    def read(self, values: ConfigValues) -> ConfigValues:
        fields = super().read(values)
        fields["head_dim"] = values.get("attention_head_size", 0)
        return fields

    def write(self, config) -> ConfigValues:
        # It follows the width: ELECTRA's generator is narrower than the checkpoint from which its values come.
        return {**super().write(config), "pooler_hidden_size": config.hidden_size}

    def new_extra(self, max_positions: int) -> ConfigValues:
        """Those of version 3, with fewer buckets for fewer positions."""
        return {
            "relative_attention": True,
            "position_buckets": min(256, max(2, max_positions // 4 * 2)),
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
        }

    # Description

    def layer(self, config, number: int) -> LayerSpec:
        plain = super().layer(config, number)
        # The scale counts the terms even where relative attention, which adds them, is off.
        scale = (config.head_dim * (1 + self._counted_terms(config))) ** -0.5
        attention = replace(plain.attention, scale=scale, position_terms=self.terms(config))
        return replace(plain, attention=attention)

    def terms(self, config) -> tuple[str, ...]:
        """The terms that relative positions add to the scores."""
        on, given = config.extra.get("relative_attention"), self._given_terms(config)
        return tuple(term for term in TERMS if on and term in given)

    def _given_terms(self, config) -> list[str]:
        given = config.extra.get("pos_att_type") or []
        if isinstance(given, str):
            given = [each.strip() for each in given.lower().split("|")]
        return given

    def _counted_terms(self, config) -> int:
        """The number of terms in the scale of the scores."""
        return sum(term in self._given_terms(config) for term in TERMS)

    def layer_dropout(self, config) -> LayerDropout:
        positions = config.hidden_dropout_p if self.terms(config) else 0.0
        return super().layer_dropout(config)._replace(positions=positions)

    def relative_positions(self, config) -> RelativePositionSpec | None:
        return self._table(config) if self.terms(config) else None

    def _table(self, config) -> RelativePositionSpec:
        buckets = max(0, config.extra.get("position_buckets", -1))
        farthest = max_distance(config.extra, config.max_positions)
        norm = NormSpec("layer", config.eps) if self._has_position_norm(config) else None
        return RelativePositionSpec(buckets, farthest, norm)

    def _has_position_norm(self, config) -> bool:
        norms = config.extra.get("norm_rel_ebd", "none").lower().split("|")
        return "layer_norm" in map(str.strip, norms)

    def position_modules(self, config) -> PositionModules:
        relative = config.extra.get("relative_attention", False)
        return PositionModules(
            self._table(config).rows if relative else 0,
            self._has_position_norm(config),
            () if config.extra.get("share_att_key", False) else self.terms(config),
        )

    def convolution(self, config) -> ConvolutionSpec | None:
        size = config.extra.get("conv_kernel_size", 0)
        if not size:
            return None
        given = config.extra.get("conv_act", "tanh")
        return ConvolutionSpec(
            size,
            config.extra.get("conv_groups", 1),
            ACTIVATIONS.get(given, given),
            NormSpec("layer", config.eps),
        )

    def position_table(self, config) -> bool:
        return bool(config.extra.get("position_biased_input", True))

    def projects_embeddings_first(self, config) -> bool:
        return True

    # Heads

    def head(self, config, spec: HeadSpec) -> HeadSpec:
        if spec is self.classifier:
            given = config.extra.get("pooler_hidden_act", "gelu")
            p = float(config.extra.get("pooler_dropout", 0.0))
            return replace(spec, activation=ACTIVATIONS.get(given, given), dropout_before_p=p)
        if spec is self.lm_head and not config.extra.get("legacy", True):
            return replace(spec, names=HEAD)
        return spec

    def token_classifier_dropout_p(self, config) -> float:
        return config.hidden_dropout_p

    # Names

    def names(self, config) -> Names:
        names = {
            **BERT_EMBEDDINGS,
            "embeddings.projection": "embeddings.embed_proj",
            **in_layers(config.num_layers, "encoder.layer.{i}", self._layer_names(config)),
        }
        if not self.position_table(config):
            names["mask_positions"] = names.pop("embeddings.position")
        positions = self.position_modules(config)
        if positions.rows:
            names["relative_positions"] = "encoder.rel_embeddings"
        if positions.norm:
            names["position_norm"] = "encoder.LayerNorm"
        if self.convolution(config) is not None:
            names |= {
                "convolution.conv": "encoder.conv.conv",
                "convolution.norm": "encoder.conv.LayerNorm",
            }
        return names

    def _layer_names(self, config) -> Names:
        query, key, value = (f"attention.self.{name}_proj" for name in ("query", "key", "value"))
        names: Names = {**BERT_LAYER, "qkv": (query, key, value)}
        own = self.position_modules(config).own_projections
        if "c2p" in own:
            names["position_key"] = "attention.self.pos_key_proj"
        if "p2c" in own:
            names["position_query"] = "attention.self.pos_query_proj"
        return names

    def dropout_names(self, config) -> dict[str, str]:
        dropouts = dict(BERT_DROPOUTS)
        if config.extra.get("relative_attention"):
            dropouts["positions"] = "attention.self.pos_dropout"
        layers = dropouts_in_layers(config.num_layers, "encoder.layer.{i}", dropouts)
        names = {"embeddings": "embeddings.dropout", **layers}
        if self.convolution(config) is not None:
            names["convolution"] = "encoder.conv.dropout"
        return names

    def renamed(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        values = super().renamed(name, tensor)
        # Version 3's files have the head by these names, and a config.json that says nothing of them.
        ours = {theirs: LEGACY_HEAD[module] for module, theirs in HEAD.items()}
        for current, value in list(values.items()):
            for theirs, legacy in ours.items():
                if current == theirs or current.startswith(f"{theirs}."):
                    values[legacy + current.removeprefix(theirs)] = value
        return values


def max_distance(values: ConfigValues, max_positions: int) -> int:
    given = values.get("max_relative_positions", -1)
    return given if given >= 1 else max_positions
