"""The models of commands that compute something of texts."""

from typing import TypeVar

import torch
from torch import nn

from fastenc.models import Encoder, SparseEncoder, checkpoint

Model = TypeVar("Model", bound=nn.Module)


def load_encoder(model: str, dtype: str, device: torch.device) -> Encoder:
    """The encoder of a folder or of a name on the hub.

    Raises: ValueError for a sparse encoder, and as :meth:`Encoder.from_pretrained` and :func:`with_finite_weights`.
    """
    folder = checkpoint.resolve(model)
    if SparseEncoder.stored_in(folder, checkpoint.read_config(folder)):
        raise ValueError(
            f"{model} gives weights of tokens (SPLADE), not vectors: use fastenc embed --sparse, or give a model of "
            "vectors"
        )
    return with_finite_weights(Encoder.from_pretrained(folder, dtype=dtype).to(device), model)


def with_finite_weights(model: Model, name: str) -> Model:
    """The model that was loaded from the folder or hub name ``name``.

    Raises: ValueError for a weight with NaN or infinity, which would make results NaN.
    """
    for key, weight in model.named_parameters():
        # aminmax() gives NaN if there is one, ten times faster than isnan().
        if weight.numel() and not torch.stack(weight.aminmax()).isfinite().all():
            raise ValueError(
                f"the weights of {name} must be numbers, got NaN or infinity in {key}: its training has diverged or "
                "the file is damaged, take an earlier checkpoint"
            )
    return model
