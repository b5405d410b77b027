"""sentence-transformers' SparseEncoder: the masked-LM head pools, in place of SpladePooling.

Where the logits go into a SpladePooling and nowhere else, the patched head returns the weights of each text in their
place, (batch, 1, vocabulary). The logits of all tokens are never formed. The pooling passes the weights on.
"""

import sys
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from fastenc.integrations.transformers.bound_forward import BoundForward, calls
from fastenc.integrations.transformers.hooks import has_global_hooks, has_hooks
from fastenc.ops import linear_segment_log_sum, linear_segment_max


class _Call:
    """A call of a SparseEncoder whose logits are read by its pooling only.

    Attributes:
        masked_lm: the masked-LM model.
        pooling: the SpladePooling.
        weights: what the head returned as logits; None until then, and if the model takes its own forward.
    """

    def __init__(self, masked_lm: nn.Module, pooling: Any):
        self.masked_lm, self.pooling = masked_lm, pooling
        self.weights: Tensor | None = None


POOLINGS, ACTIVATIONS = ("max", "sum"), ("relu", "log1p_relu")

_current_call: ContextVar[_Call | None] = ContextVar("call of a sparse encoder", default=None)


def install(model: nn.Module) -> None:
    """Give a SparseEncoder and its pooling the forwards that pool in the head; other models stay as they are."""
    sparse_encoder = _class_of_sparse_encoders()
    if sparse_encoder is None or not isinstance(model, sparse_encoder):
        return
    if "forward" in model.__dict__ and not _has_forward_of_ours(model):
        return
    model.forward = BoundForward(_forward, model)  # type: ignore[method-assign]
    for step in model.children():
        if type(step).__name__ == "SpladePooling" and "forward" not in step.__dict__:
            step.forward = BoundForward(_pool, step)  # type: ignore[method-assign]


def uninstall(model: nn.Module) -> None:
    """Restore the forwards of their classes."""
    for module in (model, *model.children()):
        if _has_forward_of_ours(module):
            del module.forward


def pooled(
    model: nn.Module, hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor
) -> Tensor | None:
    """The weights of the texts (batch, 1, vocabulary) from the inputs of the head's decoder, or None if something else
    than a pooling may read the logits."""
    call = _current_call.get()
    if call is None or call.masked_lm is not model:
        return None
    if call.pooling.pooling_strategy == "sum":
        weights = linear_segment_log_sum(
            hidden, weight, bias, cu_seqlens, activation=call.pooling.activation_function
        )
    else:
        # The logarithms do not change which token has the maximum.
        maxima, _ = linear_segment_max(hidden, weight, bias, cu_seqlens)
        weights = maxima.relu().log1p()
        if call.pooling.activation_function == "log1p_relu":
            weights = weights.log1p()
    call.weights = weights.unsqueeze(1)
    return call.weights


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    token = _current_call.set(_call_of(model))
    try:
        return type(model).forward(model, *args, **kwargs)
    finally:
        _current_call.reset(token)


def _pool(pooling: Any, features: dict[str, Any]) -> dict[str, Any]:
    call = _current_call.get()
    if call is None or call.weights is None or features["token_embeddings"] is not call.weights:
        return type(pooling).forward(pooling, features)
    weights = call.weights.squeeze(1)
    if pooling.embedding_dimension is None:
        pooling.embedding_dimension = weights.shape[1]
    features["sentence_embedding"] = weights
    return features


def _call_of(model: nn.Module) -> _Call | None:
    """The call, if the steps are a masked-LM model and a pooling that is known, and nothing else sees the logits."""
    steps = list(model.children())
    if torch.compiler.is_compiling() or len(steps) != 2 or has_global_hooks():
        return None
    transformer, pooling = steps
    settings = getattr(transformer, "modality_config", None)
    if (
        not _has_forward_of_ours(pooling)
        or pooling.pooling_strategy not in POOLINGS
        or pooling.activation_function not in ACTIVATIONS
        or any(map(has_hooks, steps))
        or not isinstance(settings, dict)
        or settings.get("text") != {"method": "forward", "method_output_name": "logits"}
    ):
        return None
    masked_lm = getattr(transformer, "model", None)
    return None if masked_lm is None else _Call(masked_lm, pooling)


def _class_of_sparse_encoders() -> Any:
    """None without sentence-transformers, or before it was imported."""
    return getattr(sys.modules.get("sentence_transformers"), "SparseEncoder", None)


def _has_forward_of_ours(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return calls(forward, _forward) or calls(forward, _pool)
