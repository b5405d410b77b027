"""The fused forward of transformers' masked-LM classes. The head computes real tokens, or labelled tokens only."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastenc.integrations.transformers import base_model, splade
from fastenc.integrations.transformers.batch_metadata import BatchMetadata
from fastenc.integrations.transformers.hooks import has_hooks
from fastenc.integrations.transformers.live_encoder import LiveEncoder
from fastenc.integrations.transformers.live_head import LiveHead
from fastenc.integrations.transformers.live_model import annotated_output, weight_difference
from fastenc.integrations.transformers.live_reading import Reading
from fastenc.models.architectures import Architecture
from fastenc.models.architectures.modules import HeadSpec
from fastenc.nn.activation import activate_plain
from fastenc.ops import (
    layer_norm,
    linear_masked_cross_entropy,
    masked_cross_entropy,
)
from fastenc.ops.gemm import linear
from fastenc.packing import PackedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_masked_lm(model: "PreTrainedModel", architecture: Architecture) -> bool:
    return (
        architecture.lm_head is not None
        and type(model).__module__.startswith("transformers.")
        and type(model).__name__ == f"{architecture.class_prefix}ForMaskedLM"
    )


class LiveMaskedLMHead(LiveHead):
    """The masked-LM head of a live model, whose weights fused ops read."""

    def __init__(self, model: "PreTrainedModel", live: LiveEncoder):
        super().__init__(model)
        names = _head(live).names
        self._linears = [names[name] for name in ("inner", "dense", "decoder") if name in names]

    def unsupported_reason(self, model: "PreTrainedModel") -> str | None:
        reason = super().unsupported_reason(model)
        if reason is not None:
            return reason
        find = self.expected.get_submodule
        differences = (
            weight_difference(model.get_submodule(p), find(p).weight.shape) for p in self._linears
        )
        return next((reason for reason in differences if reason is not None), None)


def call_reason(model: "PreTrainedModel", arguments: dict) -> str | None:
    """Why the model's own head must run for a call with these arguments, or None."""
    if has_hooks(model.base_model):
        return "the base model has hooks"
    if arguments.get("num_items_in_batch") is not None and _has_loss_function(type(model).forward):
        return "its loss is divided by num_items_in_batch"
    if getattr(model, "sparse_prediction", False) and arguments.get("labels") is not None:
        return "with config.sparse_prediction it returns the logits of labelled tokens only"
    return None


@cache
def _has_loss_function(forward: Callable) -> bool:
    """Whether a class's forward calls ``loss_function``, which also takes num_items_in_batch."""
    return "loss_function" in inspect.unwrap(forward).__code__.co_names


def forward(
    model: "PreTrainedModel",
    encoder: "PreTrainedModel",
    live: LiveEncoder,
    reading: Reading,
    arguments: dict,
    metadata: BatchMetadata | None,
    labelled_logits_only: bool,
):
    """Loss and logits in the class's output; with ``labelled_logits_only`` and labels, only the loss; under a pooling
    of :mod:`splade`, the weights of the texts as logits."""
    labels = arguments.pop("labels", None)
    wanted = base_model.wanted_states(encoder, live, arguments)
    choose = None
    # Without metadata the encoder returns all rows, because counting the labelled ones would wait for the device.
    if labels is not None and labelled_logits_only and metadata is not None:
        choose = partial(_labelled_tokens, labels, metadata.labelled)
    packed = base_model.run(live, reading, arguments, metadata, wanted, choose)
    hidden, decoder = packed.last, _module(model, live, "decoder")
    tied = decoder is None or decoder.weight is reading.modules["embeddings.word"].weight
    weight = packed.tied_weight if tied else decoder.weight
    in_decoder = decoder is not None and _head(live).decoder_has_bias
    bias = decoder.bias if in_decoder else _bias(model, live)
    targets = None if labels is None else _of_real_tokens(labels, packed.batch)
    loss = logits = None
    if targets is not None and labelled_logits_only:
        if packed.output_tokens is not None:
            targets = targets[packed.output_tokens]
        transformed = _transform(model, live, hidden)
        max_labels = None if metadata is None else metadata.labelled
        loss = linear_masked_cross_entropy(
            transformed, weight, bias, targets, max_labels=max_labels
        )
        loss = base_model.nan_without_labels(loss, targets)
    else:
        layer = _transform(model, live, hidden), weight, bias
        if targets is None:
            logits = splade.pooled(model, *layer, packed.batch.cu_seqlens)
        if logits is None:
            logits = _logits(*layer, apart=decoder is not None and not in_decoder)
            if targets is not None:
                loss = base_model.nan_without_labels(masked_cross_entropy(logits, targets), targets)
            logits = packed.padded(logits)
    states: Any = base_model.padded_states(packed, None, wanted)
    result = annotated_output(type(model).forward)(loss=loss, logits=logits, hidden_states=states)
    return base_model.in_form_asked_for(result, model, arguments)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, apart: bool) -> Tensor:
    """``apart``: the model adds the bias after the product, so that under autocast the logits have the bias's dtype."""
    if bias is None or not apart:
        return linear(hidden, weight, bias)
    return linear(hidden, weight) + bias


def _transform(model: "PreTrainedModel", live: LiveEncoder, hidden: Tensor) -> Tensor:
    """LayerNorm(act(x W + b)), without what the head does not have."""
    x, norm = hidden, _module(model, live, "norm")
    activation = _head(live).kernel_activation(live.config.activation)
    for name in ("inner", "dense"):
        layer = _module(model, live, name)
        if layer is not None:
            x = activate_plain(linear(x, layer.weight), layer.bias, activation)
    if norm is None:
        return x
    return layer_norm(x, norm.weight, getattr(norm, "bias", None), eps=norm.eps)


def _module(model: "PreTrainedModel", live: LiveEncoder, name: str) -> Any:
    path = _head(live).names.get(name)
    return None if path is None else model.get_submodule(path)


def _bias(model: Any, live: LiveEncoder) -> Tensor:
    """The bias of a head whose decoder has none."""
    module, _, name = _head(live).names["bias"].rpartition(".")
    return getattr(model.get_submodule(module), name)


def _head(live: LiveEncoder) -> HeadSpec:
    assert live.architecture.lm_head is not None  # is_masked_lm() has seen it
    return live.architecture.head(live.config, live.architecture.lm_head)


def _of_real_tokens(labels: Tensor, batch: PackedBatch) -> Tensor:
    assert batch.padded_shape is not None  # pack() sets it
    rows, length = batch.padded_shape
    if labels.numel() != rows * length:
        raise ValueError(
            f"labels must have one value for each of the {rows} x {length} tokens, got shape {tuple(labels.shape)}: "
            "pad them as the inputs"
        )
    return labels.reshape(-1)[batch.indices]


def _labelled_tokens(labels: Tensor, count: int, batch: PackedBatch) -> Tensor:
    """The indices of the tokens with a label, whose number is ``count``."""
    labelled = _of_real_tokens(labels, batch) != -100
    return labelled.nonzero_static(size=count).flatten()
