"""The models of commands that compute something of texts."""

from typing import TypeVar

import torch
from torch import nn

from fastenc.models import Encoder, SparseEncoder, checkpoint

Model = TypeVar("Model", bound=nn.Module)


def load_encoder(model: str, dtype: str, device: torch.device) -> Encoder:
    """The encoder of a folder or of a name on the hub.

    Raises: ValueError for a sparse encoder, and as :meth:`Encoder.from_pretrained` and :func:`without_nan`.
    """
    folder = checkpoint.resolve(model)
    if SparseEncoder.stored_in(folder, checkpoint.read_config(folder)):
        raise ValueError(
            f"{model} gives weights of tokens (SPLADE), not vectors: use fastenc embed --sparse, or give a model of "
            "vectors"
        )
    return without_nan(Encoder.from_pretrained(folder, dtype=dtype).to(device), model)


def without_nan(model: Model, name: str) -> Model:
    """The model that was loaded from the folder or hub name ``name``.

    Raises: ValueError for a weight with NaN, which would make results NaN.
    """
    for key, weight in model.named_parameters():
        # aminmax() gives NaN if there is one, ten times faster than isnan().
        if weight.numel() and weight.aminmax().min.isnan():
            raise ValueError(
                f"the weights of {name} must be numbers, got NaN in {key}: its training has diverged or the file is "
                "damaged, take an earlier checkpoint"
            )
    return model
