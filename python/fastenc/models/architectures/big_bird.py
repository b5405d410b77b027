"""BigBird: BERT for long texts. Source: Zaheer et al. 2020, arXiv:2007.14062."""

from typing import Any

from torch import Tensor

from fastenc.models.architectures.base import Biases, HeadSpec, Names
from fastenc.models.architectures.bert import Bert
from fastenc.models.architectures.values import ID, SWITCH, one_of


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
        "attention_type": one_of(("original_full", "block_sparse")),
        "use_bias": SWITCH,
        "rescale_embeddings": SWITCH,
        "sep_token_id": ID,
    }
    supported = {**Bert.supported, "attention_type": "original_full"}

    def new_extra(self, max_positions: int) -> dict[str, Any]:
        return {"attention_type": "original_full"}

    def biases(self, config) -> Biases:
        return Biases(qkv=bool(config.extra.get("use_bias", True)))

    def embedding_scale(self, config) -> float:
        return config.hidden_size**0.5 if config.extra.get("rescale_embeddings", False) else 1.0

    def drops_before_embedding_norm(self, config) -> bool:
        return True

    def question_end(self, config) -> int:
        return config.extra.get("sep_token_id", 66)  # transformers' default

    def live_pooled(self, model: Any, hidden: Tensor) -> Tensor:
        # In transformers this pooler is a linear layer without slicing and activation.
        return model.activation(model.pooler(hidden[:, 0]))

    def names(self, config) -> Names:
        return {**super().names(config), "pooler": "pooler"}
