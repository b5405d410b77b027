"""RoFormer: BERT with rotary positions, whose embeddings may be narrower than the layers. Source: Su et al. 2021,
arXiv:2104.09864.

Angles rotate neighbouring columns of a head (:class:`AttentionSpec`). The tokenizer splits words with jieba, which no
tokenizer.json can hold.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fastenc.models.architectures.bert import Bert
from fastenc.models.architectures.electra import Electra
from fastenc.models.architectures.names import BERT_CONFIG, Names
from fastenc.models.architectures.values import SWITCH
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.rotary import RotarySpec, rotary_table

ANGLES = "encoder.embed_positions.weight"


class RoFormer(Electra):
    name = "roformer"
    class_prefix = "RoFormer"
    prefix = "roformer"
    # The heads have the layers' dropout.
    config_names = {
        ours: theirs for ours, theirs in BERT_CONFIG.items() if ours != "classifier_dropout_p"
    } | {"embedding_size": "embedding_size"}
    lm_head = Bert.lm_head
    detector = None
    classifier = replace(Electra.classifier, activation=None)
    supported = Electra.supported | {"rotary_value": False}
    rules = {"rotary_value": SWITCH}
    word_splitter = "jieba"

    def layer(self, config, number: int) -> LayerSpec:
        plain = super().layer(config, number)
        return replace(plain, attention=replace(plain.attention, rotates_neighbours=True))

    def rotary(self, config, number: int) -> RotarySpec:
        return RotarySpec(config.head_dim, 10_000.0, bounded=True, exact=True)

    def position_table(self, config) -> bool:
        return False

    def constant_values(self, config) -> dict[str, Tensor]:
        table = rotary_table(self.rotary(config, 0), config.max_positions, "cpu")
        cosines, sines = table.chunk(2, 1)
        return {ANGLES: torch.cat([sines, cosines], 1)}

    def names(self, config) -> Names:
        names = super().names(config)
        del names["embeddings.position"]
        return names
