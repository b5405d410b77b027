"""What a model is trained to predict."""

from fastenc.objectives.mlm import MlmCollator, count_tokens
from fastenc.objectives.mlm_corruption import MlmCorruption

__all__ = ["MlmCollator", "MlmCorruption", "count_tokens"]
