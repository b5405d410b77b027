"""Packed rows back in their padded places, in plain torch."""

from torch import Tensor


def unpack(values: Tensor, indices: Tensor, places: int, padding_value: float) -> Tensor:
    """(total_tokens, ...) → (places, ...): row ``indices[t]`` is ``values[t]``, every other holds the padding."""
    padded = values.new_full((places, *values.shape[1:]), padding_value)
    return padded.index_copy_(0, indices, values)
