"""A model in bfloat16 and in int8, to be timed beside the same model in float32."""

import copy
from collections.abc import Callable

import torch

from fastenc import freeze
from fastenc.models import Encoder

FROZEN = "fastenc, frozen"
THEIRS_BF16, OWN_BF16, OWN_INT8 = (
    "Hugging Face, bfloat16",
    "fastenc, bfloat16, frozen",
    "fastenc, int8",
)
# In training steps the weights are float32.
THEIRS_AUTOCAST, OWN_AUTOCAST = "Hugging Face, bfloat16 autocast", "fastenc, bfloat16 autocast"
# A training step of BERT-base takes minutes.
EMULATED = "without AVX-512, PyTorch emulates bfloat16 too slowly to be timed"
REDUCED = (THEIRS_BF16, OWN_BF16, OWN_INT8, THEIRS_AUTOCAST, OWN_AUTOCAST)


def in_bfloat16(model: torch.nn.Module) -> torch.nn.Module:
    """A copy as ``from_pretrained(dtype=torch.bfloat16)`` loads it: the frequencies of rotations stay float32."""
    model = copy.deepcopy(model)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    return model


def frozen_formats(theirs: torch.nn.Module, own: Encoder) -> dict[str, torch.nn.Module | str]:
    """{provider: a copy for inference on a CPU, or the reason why the encoder has none}."""
    formats: dict[str, torch.nn.Module | str] = {
        FROZEN: freeze(copy.deepcopy(own)),
        THEIRS_BF16: EMULATED if emulates_slowly() else in_bfloat16(theirs),
        OWN_BF16: freeze(in_bfloat16(own)),
    }
    try:
        formats[OWN_INT8] = freeze(copy.deepcopy(own), dtype="int8")
    except ValueError as error:  # the processor, or a layer's widths
        formats[OWN_INT8] = str(error)
    return formats


def their_autocast(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor] | str:
    """Hugging Face's training step in bfloat16, or why it is not timed."""
    return EMULATED if emulates_slowly() else step


def emulates_slowly() -> bool:
    return torch.backends.cpu.get_cpu_capability() != "AVX512"


def largest_error(provider: str, in_float32: float, reduced: float = 5e-2) -> float:
    """The relative error from which on a provider's result counts as wrong."""
    return reduced if provider in REDUCED else in_float32
