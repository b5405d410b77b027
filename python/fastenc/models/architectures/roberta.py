"""RoBERTa, and the models that are RoBERTa under another name. Source: Liu et al. 2019, arXiv:1907.11692.

Positions count from the row after the padding token's.
"""

from fastenc.models.architectures.base import HeadSpec
from fastenc.models.architectures.bert import Bert


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


class XlmRoberta(Roberta):
    name = "xlm-roberta"
    class_prefix = "XLMRoberta"


class Camembert(Roberta):
    name = "camembert"
    class_prefix = "Camembert"


class Data2VecText(Roberta):
    name = "data2vec-text"
    class_prefix = "Data2VecText"
    prefix = "data2vec_text"
