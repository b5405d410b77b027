"""BigBird: BERT for long texts. Source: Zaheer et al. 2020, arXiv:2007.14062."""

import logging
from dataclasses import replace
from typing import Any

from torch import Tensor

from fastenc.models.architectures.bert import Bert
from fastenc.models.architectures.modules import Biases, HeadSpec
from fastenc.models.architectures.names import Names
from fastenc.models.architectures.values import AT_LEAST_0, COUNT, ID, SWITCH, ConfigValues, one_of
from fastenc.nn.block_plan import FIXED
from fastenc.nn.layer_spec import LayerSpec

FULL, SPARSE = "original_full", "block_sparse"


class BigBird(Bert):
    name = "big_bird"
    class_prefix = "BigBird"
    new_config = {"activation": "gelu_new", "max_positions": 4096}
    has_unread_pooler = True
    classifier = HeadSpec(
        {"dense": "classifier.dense", "out": "classifier.out_proj"},
        activation=None,
        dropout_before=True,
    )
    question_answerer = HeadSpec(
        {
            "up": "qa_classifier.intermediate.dense",
            "down": "qa_classifier.output.dense",
            "norm": "qa_classifier.output.LayerNorm",
            "out": "qa_classifier.qa_outputs",
        },
        activation=None,
        dropout_before=True,
        dropout_after=False,
    )
    rules = {
        "attention_type": one_of((FULL, SPARSE)),
        "block_size": COUNT,
        "num_random_blocks": AT_LEAST_0,
        "use_bias": SWITCH,
        "rescale_embeddings": SWITCH,
        "sep_token_id": ID,
    }

    def new_extra(self, max_positions: int) -> ConfigValues:
        return {"attention_type": SPARSE, "block_size": 64, "num_random_blocks": 3}

    def layer(self, config, number: int) -> LayerSpec:
        plain, extra = super().layer(config, number), config.extra
        if extra.get("attention_type", SPARSE) == FULL:
            return plain
        blocks = {
            "block_size": extra.get("block_size", 64),
            "random_blocks": extra.get("num_random_blocks", 3),
        }
        return replace(plain, attention=replace(plain.attention, **blocks))

    def biases(self, config) -> Biases:
        return Biases(qkv=bool(config.extra.get("use_bias", True)))

    def embedding_scale(self, config) -> float:
        return config.hidden_size**0.5 if config.extra.get("rescale_embeddings", False) else 1.0

    def takes_inputs_embeds(self, config) -> bool:
        return self.embedding_scale(config) == 1.0  # transformers scales given vectors, too

    def drops_before_embedding_norm(self, config) -> bool:
        return True

    def question_end(self, config) -> int:
        return config.extra.get("sep_token_id", 66)  # transformers' default

    def live_changes(self, model: Any) -> ConfigValues:
        return {"attention_type": model.attention_type}

    def follow_live(self, model: Any, length: int) -> None:
        config = model.config
        longest = (FIXED + 2 * config.num_random_blocks) * config.block_size
        if model.attention_type == SPARSE and length <= longest:
            logging.getLogger(type(model).__module__).warning(
                "A batch has %d tokens, and block-sparse attention begins above %d: changing attention type to "
                "'original_full', for later batches too",
                length,
                longest,
            )
            model.set_attention_type(FULL)

    def live_pooled(self, model: Any, hidden: Tensor) -> Tensor:
        # In transformers this pooler is a linear layer without slicing and activation.
        return model.activation(model.pooler(hidden[:, 0]))

    def dropout_names(self, config) -> dict[str, str]:
        names = super().dropout_names(config)
        if config.extra.get("attention_type", SPARSE) == FULL:
            return names
        # The modules of block-sparse attention have no dropout.
        return {name: path for name, path in names.items() if not name.endswith(".attention")}

    def names(self, config) -> Names:
        return {**super().names(config), "pooler": "pooler"}
