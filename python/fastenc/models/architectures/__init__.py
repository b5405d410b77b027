"""The supported architectures. Each file describes one family of models."""

from fastenc.models.architectures.albert import Albert
from fastenc.models.architectures.bart import Bart, MBart
from fastenc.models.architectures.base import Architecture
from fastenc.models.architectures.bert import Bert
from fastenc.models.architectures.big_bird import BigBird
from fastenc.models.architectures.deberta import Deberta
from fastenc.models.architectures.deberta_v2 import DebertaV2
from fastenc.models.architectures.distilbert import DistilBert
from fastenc.models.architectures.electra import Electra
from fastenc.models.architectures.embedding_gemma2 import EmbeddingGemma2
from fastenc.models.architectures.ernie import Ernie
from fastenc.models.architectures.esm import Esm
from fastenc.models.architectures.esmc import Esmc
from fastenc.models.architectures.eurobert import EuroBert
from fastenc.models.architectures.gemma3 import Gemma3
from fastenc.models.architectures.gte import Gte
from fastenc.models.architectures.jina_embeddings_v3 import JinaEmbeddingsV3
from fastenc.models.architectures.longformer import Longformer
from fastenc.models.architectures.m2m_100 import M2M100
from fastenc.models.architectures.marian import Marian
from fastenc.models.architectures.megatron_bert import MegatronBert
from fastenc.models.architectures.modernbert import ModernBert
from fastenc.models.architectures.mpnet import MPNet
from fastenc.models.architectures.nomic_bert import NomicBert
from fastenc.models.architectures.pegasus import Pegasus
from fastenc.models.architectures.qwen3 import Qwen3
from fastenc.models.architectures.rembert import RemBert
from fastenc.models.architectures.roberta import (
    Camembert,
    Data2VecText,
    Roberta,
    XlmRoberta,
    XlmRobertaXL,
)
from fastenc.models.architectures.roformer import RoFormer
from fastenc.models.architectures.t5 import MT5, T5, UMT5
from fastenc.models.architectures.ultrabert import UltraBert
from fastenc.models.architectures.values import ConfigValues

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture()
    for architecture in (
        Bert,
        Roberta,
        JinaEmbeddingsV3,
        XlmRoberta,
        XlmRobertaXL,
        Camembert,
        Data2VecText,
        DistilBert,
        Electra,
        MPNet,
        Deberta,
        DebertaV2,
        Longformer,
        BigBird,
        MegatronBert,
        Ernie,
        RemBert,
        T5,
        MT5,
        UMT5,
        Albert,
        Bart,
        MBart,
        Marian,
        Pegasus,
        M2M100,
        ModernBert,
        NomicBert,
        RoFormer,
        Gte,
        EuroBert,
        Qwen3,
        Gemma3,
        EmbeddingGemma2,
        Esm,
        Esmc,
        UltraBert,
    )
}


def architecture_named(name: str | None) -> Architecture:
    """The architecture with this model_type. Raises: ValueError that lists the supported ones."""
    if name not in ARCHITECTURES:
        raise ValueError(
            f"model_type must be one of {sorted(ARCHITECTURES)}, got {name!r}: "
            "is config.json that of an encoder of these families?"
        )
    return ARCHITECTURES[name]


def normalize_config(values: ConfigValues) -> ConfigValues:
    """The contents of a config.json in transformers' current names; those of the hub's remote code are converted."""
    for architecture in ARCHITECTURES.values():
        if architecture.describes(values):
            return architecture.normalize_config(values)
    return values


__all__ = ["ARCHITECTURES", "Architecture", "architecture_named", "normalize_config"]
