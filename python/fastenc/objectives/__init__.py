"""What a model is trained to predict."""

from fastenc.objectives.mlm import MlmCollator, count_tokens

__all__ = ["MlmCollator", "count_tokens"]
