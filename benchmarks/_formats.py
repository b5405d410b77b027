"""On a CPU: a model in bfloat16 and in int8, to be timed beside the same model in float32."""

import copy

import torch

from fastenc import freeze
from fastenc.models import Encoder

FROZEN = "fastenc, frozen"
THEIRS_BF16, OWN_BF16, OWN_INT8 = (
    "Hugging Face, bfloat16",
    "fastenc, bfloat16, frozen",
    "fastenc, int8",
)
# Of training steps, over float32 weights.
THEIRS_AUTOCAST, OWN_AUTOCAST = "Hugging Face, bfloat16 autocast", "fastenc, bfloat16 autocast"
REDUCED = (THEIRS_BF16, OWN_BF16, OWN_INT8, THEIRS_AUTOCAST, OWN_AUTOCAST)


def in_dtype(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A copy as ``from_pretrained(dtype=...)`` loads it: the frequencies of rotations stay float32."""
    model = copy.deepcopy(model)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


def frozen_formats(theirs: torch.nn.Module, own: Encoder) -> dict[str, torch.nn.Module | str]:
    """Copies for inference by the provider's name, or the reason why the encoder has no such copy."""
    formats: dict[str, torch.nn.Module | str] = {
        FROZEN: freeze(copy.deepcopy(own)),
        THEIRS_BF16: in_dtype(theirs, torch.bfloat16),
        OWN_BF16: freeze(in_dtype(own, torch.bfloat16)),
    }
    try:
        formats[OWN_INT8] = freeze(copy.deepcopy(own), dtype="int8")
    except ValueError as error:  # the processor, or a layer's widths
        formats[OWN_INT8] = str(error)
    return formats


def largest_error(provider: str, in_float32: float) -> float:
    """The largest relative error of a provider's result, with which it is still timed."""
    return 5e-2 if provider in REDUCED else in_float32
