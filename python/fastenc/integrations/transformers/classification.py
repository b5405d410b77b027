"""transformers' heads that classify a text by its first token alone."""

from typing import TYPE_CHECKING

from fastenc.integrations.transformers.bound_forward import BoundForward
from fastenc.integrations.transformers.hooks import has_hooks
from fastenc.integrations.transformers.live_encoder import LiveEncoder
from fastenc.integrations.transformers.live_head import LiveHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POOLING = "classifier_pooling"  # a switch of the configuration that some heads read in every call


class LiveClassifier(LiveHead):
    """A live model's head that reads the first token alone.

    Attributes: pooling: the value of ``config.classifier_pooling`` for which it does so; None without that switch.
    """

    def __init__(self, model: "PreTrainedModel", live: LiveEncoder):
        super().__init__(model)
        self.pooling = live.config.extra.get(POOLING)


def live_head(model: "PreTrainedModel", live: LiveEncoder) -> LiveClassifier | None:
    """What :func:`fastenc.patch` stores for a head that reads the first token alone; None for another head."""
    architecture = live.architecture
    reads_first = (
        architecture.classifier is not None
        and type(model).__module__.startswith("transformers.")
        and type(model).__name__ == f"{architecture.class_prefix}ForSequenceClassification"
        and architecture.classifier_pooling(live.config) == "cls"
    )
    return LiveClassifier(model, live) if reads_first else None


def reads_first_token(
    model: "PreTrainedModel", encoder: "PreTrainedModel", head: LiveClassifier | None
) -> bool:
    """Whether the first token's state is all that the head reads, and nothing around the encoder reads more."""
    if head is None or has_hooks(encoder) or has_hooks(model.base_model):
        return False
    if not isinstance(encoder.__dict__.get("forward"), BoundForward):
        return False  # a forward of the user, which may call ours
    if getattr(model.config, POOLING, None) != head.pooling:
        return False
    return head.unsupported_reason(model) is None
