"""transformers' heads that classify a text by its first token alone."""

from typing import TYPE_CHECKING

from fastenc.integrations.transformers.hooks import has_hooks
from fastenc.integrations.transformers.live_encoder import LiveEncoder
from fastenc.integrations.transformers.live_head import LiveHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def live_head(model: "PreTrainedModel", live: LiveEncoder) -> LiveHead | None:
    """What :func:`fastenc.patch` stores for a head that reads the first token alone; None for another head."""
    architecture = live.architecture
    reads_first = (
        architecture.classifier is not None
        and type(model).__name__ == f"{architecture.class_prefix}ForSequenceClassification"
        and architecture.classifier_pooling(live.config) == "cls"
    )
    return LiveHead(model) if reads_first else None


def reads_first_token(
    model: "PreTrainedModel", encoder: "PreTrainedModel", head: LiveHead | None
) -> bool:
    """Whether the first token's state is all that the head reads, and no hook reads more."""
    if head is None or has_hooks(encoder) or has_hooks(model.base_model):
        return False
    return head.unsupported_reason(model) is None
