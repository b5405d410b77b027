"""ESM-2 and ESM-1b, encoders of proteins. Sources: Lin et al. 2022, doi:10.1101/2022.07.20.500902; Rives et al. 2021,
doi:10.1073/pnas.2016239118.

The layers are BERT's in pre-norm. ESM-2 has rotary positions, ESM-1b a position table. With ``token_dropout`` the
embeddings of mask tokens are 0, and the others are scaled by the share of masked tokens. The head for contacts between
residues reads attention weights, which the fused forward does not compute; its weights are kept in the files.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fastenc.models.architectures.bert import BERT_DROPOUTS, BERT_LAYER
from fastenc.models.architectures.modules import HeadSpec
from fastenc.models.architectures.names import (
    BERT_CONFIG,
    Names,
    dropouts_in_layers,
    first_norms,
    in_layers,
)
from fastenc.models.architectures.roberta import Roberta
from fastenc.models.architectures.values import ID, POSITIVE, SWITCH, ConfigValues, one_of
from fastenc.nn.layer_spec import LayerSpec
from fastenc.nn.rotary import RotarySpec, StoredFrequencies, plain_frequencies

FREQUENCIES = "rotary_embeddings.inv_freq"


class Esm(Roberta):
    name = "esm"
    class_prefix = "Esm"
    prefix = "esm"
    config_names = {
        ours: theirs
        for ours, theirs in BERT_CONFIG.items()
        if ours not in ("type_vocab_size", "activation", "classifier_dropout_p")
    }
    defaults = {"eps": 1e-12, "pad_token_id": 1, "activation": "gelu", "max_positions": 1026}
    new_config = {"type_vocab_size": 0, "pad_token_id": 1, "position_offset": 2}
    has_token_types = False
    embeds_padding = False  # embeddings are multiplied by the mask
    lm_head = HeadSpec(
        {
            "dense": "lm_head.dense",
            "norm": "lm_head.layer_norm",
            "decoder": "lm_head.decoder",
            "bias": "lm_head.bias",
        },
        decoder_has_bias=False,
    )
    question_answerer = None
    supported = {"is_decoder": False, "add_cross_attention": False, "is_folding_model": False}
    constants = {FREQUENCIES: "inv_freq"}
    rules = {
        "position_embedding_type": one_of(("absolute", "rotary")),
        "rope_theta": POSITIVE,
        "emb_layer_norm_before": SWITCH.or_none(),
        "token_dropout": SWITCH.or_none(),
        "mask_token_id": ID,
    }

    def takes_inputs_embeds(self, config) -> bool:
        return False

    def check_supported(self, values: ConfigValues) -> None:
        super().check_supported(values)
        if values.get("token_dropout") and values.get("mask_token_id") is None:
            raise ValueError(
                "config.json: mask_token_id must be an id if token_dropout is on, got null: add it"
            )

    def read(self, values: ConfigValues) -> ConfigValues:
        fields = super().read(values)
        if _is_rotary(values):
            fields["max_positions"] += fields.pop("position_offset")
        return fields

    def layer(self, config, number: int) -> LayerSpec:
        return replace(super().layer(config, number), pre_norm=True)

    def rotary(self, config, number: int) -> RotarySpec | None:
        if not _is_rotary(config.extra):
            return None
        stored = config.extra.get(self.constants[FREQUENCIES])
        return RotarySpec(
            config.head_dim,
            self._theta(config),
            None if stored is None else StoredFrequencies(tuple(stored)),
        )

    def constant_values(self, config) -> dict[str, Tensor]:
        if not _is_rotary(config.extra):
            return {}
        stored = config.extra.get(self.constants[FREQUENCIES])
        values = (
            plain_frequencies(config.head_dim, self._theta(config))
            if stored is None
            else torch.tensor(stored)
        )
        return {FREQUENCIES: values}

    def first_norm(self, config) -> bool:
        return True

    def embedding_norm(self, config):
        return super().embedding_norm(config) if config.extra.get("emb_layer_norm_before") else None

    def masked_embedding(self, config) -> int | None:
        return config.extra["mask_token_id"] if config.extra.get("token_dropout") else None

    def position_table(self, config) -> bool:
        return not _is_rotary(config.extra)

    def embedding_dropout_p(self, config) -> float:
        return 0.0

    def kept_linears(self, config) -> dict[str, tuple[int, int]]:
        return {"contact_head": (config.num_layers * config.num_heads, 1)}

    def names(self, config) -> Names:
        count, path = config.num_layers, "encoder.layer.{i}"
        layer = BERT_LAYER | {"attention_norm": "LayerNorm"}
        return {
            "embeddings.word": "embeddings.word_embeddings",
            "embeddings.position": "embeddings.position_embeddings",
            "embeddings.norm": "embeddings.layer_norm",
            **in_layers(count, path, layer),
            **first_norms(count, f"{path}.attention.LayerNorm", "encoder.emb_layer_norm_after"),
            "kept.contact_head": "contact_head.regression",
            "pooler": "pooler.dense",
        }

    def dropout_names(self, config) -> dict[str, str]:
        modules = {name: path for name, path in BERT_DROPOUTS.items() if name != "attention"}
        return dropouts_in_layers(config.num_layers, "encoder.layer.{i}", modules)

    def renamed(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name.endswith(f"attention.self.{FREQUENCIES}"):  # older files have them in every layer
            return {FREQUENCIES: tensor}
        return super().renamed(name, tensor)

    def _theta(self, config) -> float:
        return config.extra.get("rope_theta", 10_000.0)


def _is_rotary(values: ConfigValues) -> bool:
    return values.get("position_embedding_type") == "rotary"
