"""Encoders and their heads, loaded from and saved to the families' own checkpoints."""

from fastenc.models.config import EncoderConfig
from fastenc.models.encoder import Encoder, EncoderOutput
from fastenc.models.graph_inference import InferenceRunner, compile_inference
from fastenc.models.masked_lm import LossPart, MaskedLM, ModelOutput
from fastenc.models.question_answerer import QuestionAnswerer
from fastenc.models.sense_model import SenseInventory, WordSenseModel
from fastenc.models.sentence_embedder import SentenceEmbedder
from fastenc.models.sequence_classifier import SequenceClassifier
from fastenc.models.span_classifier import SpanClassifier
from fastenc.models.token_classifier import TokenClassifier

__all__ = [
    "Encoder",
    "EncoderConfig",
    "EncoderOutput",
    "InferenceRunner",
    "LossPart",
    "MaskedLM",
    "ModelOutput",
    "QuestionAnswerer",
    "SenseInventory",
    "SentenceEmbedder",
    "SequenceClassifier",
    "SpanClassifier",
    "TokenClassifier",
    "WordSenseModel",
    "compile_inference",
]
