"""Tasks: everything between files and models, with their metrics, and the evaluation of masked LMs."""

from fastenc.tasks.base import Task
from fastenc.tasks.classification import (
    SequenceClassification,
)
from fastenc.tasks.embedding_file import embed_file
from fastenc.tasks.prediction import predict_file
from fastenc.tasks.predictor import Predictor, predictor
from fastenc.tasks.question_answering import QuestionAnswering
from fastenc.tasks.registry import TASKS, make_task, task_named, task_of, task_of_model
from fastenc.tasks.reranker import Reranker
from fastenc.tasks.reranking import Reranking
from fastenc.tasks.sentence_embedding import SentenceEmbedding
from fastenc.tasks.sequence_to_sequence import SequenceToSequence
from fastenc.tasks.span_ner import FoundEntity, SpanNer
from fastenc.tasks.sparse_embedding import SparseEmbedding
from fastenc.tasks.tagging import Tagging, TokenClassification
from fastenc.tasks.word_sense import SensePrediction, WordSense

__all__ = [
    "TASKS",
    "FoundEntity",
    "Predictor",
    "QuestionAnswering",
    "Reranker",
    "Reranking",
    "SensePrediction",
    "SentenceEmbedding",
    "SequenceClassification",
    "SequenceToSequence",
    "SpanNer",
    "SparseEmbedding",
    "Tagging",
    "Task",
    "TokenClassification",
    "WordSense",
    "embed_file",
    "make_task",
    "predict_file",
    "predictor",
    "task_named",
    "task_of",
    "task_of_model",
]
