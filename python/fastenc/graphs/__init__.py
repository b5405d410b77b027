"""CUDA graphs of a model's inference and of its training step: recorded once a size, then started as one launch."""

from fastenc.graphs.inference import InferenceRunner, compile_inference
from fastenc.graphs.training import TrainingResult, TrainingRunner, compile_training

__all__ = [
    "InferenceRunner",
    "TrainingResult",
    "TrainingRunner",
    "compile_inference",
    "compile_training",
]
