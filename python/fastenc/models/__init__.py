"""Encoders and models with heads, loaded from and saved to checkpoints in transformers' format."""

from fastenc.models.config import EncoderConfig
from fastenc.models.embedding.max_sim import max_sim
from fastenc.models.embedding.quantization import quantize_vectors
from fastenc.models.embedding.sentence_files import SentenceSettings
from fastenc.models.encoder import Encoder, EncoderOutput
from fastenc.models.heads.cross_encoder import CrossEncoder
from fastenc.models.heads.discriminator import Discriminator
from fastenc.models.heads.m3_encoder import M3Encoder, M3Vectors
from fastenc.models.heads.masked_lm import MaskedLM
from fastenc.models.heads.question_answerer import QuestionAnswerer
from fastenc.models.heads.sense_model import SenseInventory, WordSenseModel
from fastenc.models.heads.sentence_embedder import SentenceEmbedder
from fastenc.models.heads.seq2seq import Seq2Seq
from fastenc.models.heads.sequence_classifier import SequenceClassifier
from fastenc.models.heads.span_classifier import SpanClassifier
from fastenc.models.heads.sparse_encoder import SparseEncoder
from fastenc.models.heads.token_classifier import TokenClassifier
from fastenc.models.longformer_conversion import convert_to_longformer
from fastenc.models.outputs import LossTerm, ModelOutput
from fastenc.models.pretrained import PretrainedModel

__all__ = [
    "CrossEncoder",
    "Discriminator",
    "Encoder",
    "EncoderConfig",
    "EncoderOutput",
    "LossTerm",
    "M3Encoder",
    "M3Vectors",
    "MaskedLM",
    "ModelOutput",
    "PretrainedModel",
    "QuestionAnswerer",
    "SenseInventory",
    "SentenceEmbedder",
    "SentenceSettings",
    "Seq2Seq",
    "SequenceClassifier",
    "SpanClassifier",
    "SparseEncoder",
    "TokenClassifier",
    "WordSenseModel",
    "convert_to_longformer",
    "max_sim",
    "quantize_vectors",
]
