"""Chooses which of a model's parameters are trained."""

import re

from torch import nn

from fastenc.models.adapters.adaptations import encoder_of
from fastenc.models.pretrained import PretrainedModel

# Parts of an encoder that are trained with the head: its pooler, also the pooler's LoRA, and the mix of layers.
OF_THE_HEAD = re.compile(r"(adapted\.parts\.\w+\.)?pooler\.|mix\.")


def freeze_encoder(model: PretrainedModel, layers: int | None = None) -> None:
    """Freeze the embeddings and the lower layers of a model's encoder, with what adaptations add to them.

    Layers below the lowest trained parameter compute no gradient and keep no activations. Their dropout stays active
    in training, as in transformers.

    Args:
        layers: number of layers to freeze; None: the whole encoder except its pooler.
    Raises: ValueError if the model has fewer layers.
    Source: Howard and Ruder 2018, arXiv:1801.06146; Lee et al. 2019, arXiv:1911.03090.
    """
    encoder = encoder_of(model)
    depth = len(encoder.layers)
    if layers is not None and not 0 <= layers <= depth:
        raise ValueError(
            f"from 0 to {depth} layers can be frozen, because the model has {depth}, got {layers}: give another number"
        )
    named = encoder.named_parameters()
    if layers is not None:
        below = (
            encoder.embeddings,
            encoder.first_norm,
            encoder.relative_positions,
            encoder.position_norm,
        )
        in_first_layer = (encoder.convolution,) if layers else ()
        for module in (*below, *encoder.layers[:layers], *in_first_layer):
            if module is not None:
                module.requires_grad_(False)
        named = encoder.adapted.named_parameters("adapted")
    for name, parameter in named:
        if not OF_THE_HEAD.match(name):
            parameter.requires_grad_(False)


def trained_parameters(model: nn.Module) -> tuple[int, int]:
    """(number of trained parameters, number of all parameters) of a model, counted by elements."""
    counts = [(p.numel() if p.requires_grad else 0, p.numel()) for p in model.parameters()]
    trained, everything = (sum(column) for column in zip(*counts, strict=True))
    return trained, everything
