"""The fused forward of the Hugging Face masked-LM classes: a head over real tokens, or labelled ones only."""

from typing import Any

import torch
from torch import Tensor, nn

from fastenc.integrations.transformers import architectures, base_model
from fastenc.integrations.transformers.batch_facts import BatchFacts
from fastenc.ops import linear_masked_cross_entropy, masked_cross_entropy
from fastenc.ops._matmul import linear
from fastenc.packing import PackedBatch


def obstacle(model: Any) -> str | None:
    """Why the head must take the model's own forward, or None."""
    _, decoder = architectures.MASKED_LM_HEADS[type(model).__name__](model)
    if type(decoder) is not nn.Linear or base_model.is_hooked(decoder):
        return f"the decoder is a {type(decoder).__name__} that was replaced or hooked"
    if base_model.has_hooks(model.base_model):
        return "the base model has hooks"
    return None


def forward(
    model: Any,
    base: Any,
    layers: base_model.Layers,
    arguments: dict,
    facts: BatchFacts | None,
    labelled_logits_only: bool,
):
    """Loss and logits as the class returns them; with ``labelled_logits_only`` and labels, the loss only."""
    from transformers.modeling_outputs import MaskedLMOutput

    labels = arguments.pop("labels", None)
    keep_all = base_model.wanted(base, arguments, "output_hidden_states")
    packed = base_model.run(base, layers, arguments, facts, keep_all)
    hidden = packed.hidden_states[-1]
    transform, decoder = architectures.MASKED_LM_HEADS[type(model).__name__](model)
    tied = decoder.weight is base.embeddings.word_embeddings.weight
    weight = packed.word_table if tied else decoder.weight
    own_labels = None if labels is None else _of_real_tokens(labels, packed.batch)
    loss = logits = None
    if own_labels is not None and labelled_logits_only:
        # Without facts the transform runs on all rows: to count the labelled ones would wait for the device.
        if facts is not None:
            rows = (own_labels != -100).nonzero_static(size=facts.labelled).flatten()
            hidden, own_labels = hidden.index_select(0, rows), own_labels[rows]
        loss = linear_masked_cross_entropy(transform(hidden), weight, decoder.bias, own_labels)
        loss = _nan_without_labels(loss, own_labels)
    else:
        logits = linear(transform(hidden), weight, decoder.bias)
        if own_labels is not None:
            loss = _nan_without_labels(masked_cross_entropy(logits, own_labels), own_labels)
        logits = packed.padded(logits)
    states = tuple(map(packed.padded, packed.hidden_states)) if keep_all else None
    result = MaskedLMOutput(loss=loss, logits=logits, hidden_states=states)
    return result if base_model.wanted(model, arguments, "return_dict") else result.to_tuple()


def _of_real_tokens(labels: Tensor, batch: PackedBatch) -> Tensor:
    assert batch.padded_shape is not None  # pack() sets it
    rows, length = batch.padded_shape
    if labels.numel() != rows * length:
        raise ValueError(
            f"labels must have one value for each of the {rows} x {length} inputs, got shape {tuple(labels.shape)}"
        )
    return labels.reshape(-1)[batch.indices]


def _nan_without_labels(loss: Tensor, labels: Tensor) -> Tensor:
    # As the class's own loss is without any label; a caller may rely on seeing that.
    return torch.where((labels != -100).any(), loss, torch.nan)
