"""The encoder of a command that computes vectors of texts."""

import torch

from fastenc.models import Encoder, SparseEncoder, checkpoint


def load_encoder(model: str, dtype: str, device: torch.device) -> Encoder:
    """The encoder of a folder or of a name on the hub.

    Raises: ValueError for a sparse encoder, and as :meth:`Encoder.from_pretrained`.
    """
    folder = checkpoint.resolve(model)
    if SparseEncoder.stored_in(folder, checkpoint.read_config(folder)):
        raise ValueError(
            f"{model} gives weights of tokens (SPLADE), not vectors: use fastenc embed --sparse, or give a model of "
            "vectors"
        )
    return Encoder.from_pretrained(folder, dtype=dtype).to(device)
