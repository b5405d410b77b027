"""sentence-transformers' SparseEncoder with max pooling: the masked-LM head returns each text's maxima.

SpladePooling takes the maximum over tokens of log(1 + relu(logit)), which does not change which token has it. So the
patched head returns logits of one token, the largest of each vocabulary entry, and the pooling runs as it is.
"""

import functools
import sys
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from fastenc.integrations.transformers.hooks import has_global_hooks, has_hooks

# The masked-LM model whose logits go into a pooling and nowhere else, during a call.
_pooled_model: ContextVar[nn.Module | None] = ContextVar("pooled masked-LM model", default=None)


def install(model: nn.Module) -> None:
    """Give a SparseEncoder the forward that pools in the head; other models stay as they are."""
    sparse_encoder = _class_of_sparse_encoders()
    if sparse_encoder is not None and isinstance(model, sparse_encoder):
        model.forward = functools.partial(_forward, model)  # type: ignore[method-assign]


def uninstall(model: nn.Module) -> None:
    """Restore the forward of its class."""
    if getattr(model.__dict__.get("forward"), "func", None) is _forward:
        del model.forward


def is_pooled(model: nn.Module) -> bool:
    """Whether this call's logits are read by a max pooling only."""
    return _pooled_model.get() is model


def _class_of_sparse_encoders() -> Any:
    """None without sentence-transformers, or before it was imported."""
    return getattr(sys.modules.get("sentence_transformers"), "SparseEncoder", None)


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    token = _pooled_model.set(_masked_lm_under_pooling(model))
    try:
        return type(model).forward(model, *args, **kwargs)
    finally:
        _pooled_model.reset(token)


def _masked_lm_under_pooling(model: nn.Module) -> nn.Module | None:
    """The masked-LM model, if the steps are that model and a max pooling, and nothing else sees the logits."""
    steps = list(model.children())
    if torch.compiler.is_compiling() or len(steps) != 2 or has_global_hooks():
        return None
    transformer, pooling = steps
    settings = getattr(transformer, "modality_config", None)
    if (
        type(pooling).__name__ != "SpladePooling"
        or getattr(pooling, "pooling_strategy", None) != "max"
        or "forward" in pooling.__dict__
        or any(map(has_hooks, steps))
        or not isinstance(settings, dict)
        or settings.get("text") != {"method": "forward", "method_output_name": "logits"}
    ):
        return None
    return getattr(transformer, "model", None)
