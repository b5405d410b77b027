"""Which of a model's parameters are trained."""

from torch import nn

from fastenc.models.adaptations import encoder_of
from fastenc.models.pretrained import PretrainedModel


def freeze_encoder(model: PretrainedModel, layers: int | None = None) -> None:
    """Freeze the embeddings and the lower ``layers`` layers, or with None the whole encoder but its pooler.

    Nothing below the lowest trained parameter gets a gradient or keeps activations. Their dropout goes on in training,
    as in transformers.
    Raises: ValueError for a number of layers that the model does not have.
    Source: Howard and Ruder 2018, arXiv:1801.06146; Lee et al. 2019, arXiv:1911.03090.
    """
    encoder = encoder_of(model)
    depth = len(encoder.layers)
    if layers is not None and not 0 <= layers <= depth:
        raise ValueError(f"layers must be in [0, {depth}], the model's own number, got {layers}")
    encoder.embeddings.requires_grad_(False)
    for layer in encoder.layers[:layers]:
        layer.requires_grad_(False)
    if encoder.first_norm is not None:
        encoder.first_norm.requires_grad_(False)
    if layers is None:
        encoder.relative_biases.requires_grad_(False)


def trained_parameters(model: nn.Module) -> tuple[int, int]:
    """(numbers that training changes, all numbers) of a model's parameters."""
    counts = [(p.numel() if p.requires_grad else 0, p.numel()) for p in model.parameters()]
    trained, everything = (sum(column) for column in zip(*counts, strict=True))
    return trained, everything
