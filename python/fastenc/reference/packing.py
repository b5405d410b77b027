"""Packed rows back in their padded places, in plain torch."""

from torch import Tensor


def unpack(values: Tensor, indices: Tensor, places: int) -> Tensor:
    """(total_tokens, ...) → (places, ...): row ``indices[t]`` is ``values[t]``, every other row is 0."""
    return values.new_zeros((places, *values.shape[1:])).index_copy_(0, indices, values)
