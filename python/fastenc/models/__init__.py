"""Encoders and models with heads, loaded from and saved to checkpoints in transformers' format."""

from fastenc.models.config import EncoderConfig
from fastenc.models.encoder import Encoder, EncoderOutput
from fastenc.models.graph_inference import InferenceRunner, compile_inference
from fastenc.models.graph_training import TrainingResult, TrainingRunner, compile_training
from fastenc.models.long_texts import LongTexts
from fastenc.models.masked_lm import MaskedLM
from fastenc.models.outputs import LossTerm, ModelOutput
from fastenc.models.question_answerer import QuestionAnswerer
from fastenc.models.sense_model import SenseInventory, WordSenseModel
from fastenc.models.sentence_embedder import SentenceEmbedder
from fastenc.models.sequence_classifier import SequenceClassifier
from fastenc.models.span_classifier import SpanClassifier
from fastenc.models.token_classifier import TokenClassifier
from fastenc.models.tokenizers import SpecialTokens, load_tokenizer, save_tokenizer, special_tokens

__all__ = [
    "Encoder",
    "EncoderConfig",
    "EncoderOutput",
    "InferenceRunner",
    "LongTexts",
    "LossTerm",
    "MaskedLM",
    "ModelOutput",
    "QuestionAnswerer",
    "SenseInventory",
    "SentenceEmbedder",
    "SequenceClassifier",
    "SpanClassifier",
    "SpecialTokens",
    "TokenClassifier",
    "TrainingResult",
    "TrainingRunner",
    "WordSenseModel",
    "compile_inference",
    "compile_training",
    "load_tokenizer",
    "save_tokenizer",
    "special_tokens",
]
