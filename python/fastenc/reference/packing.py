"""Packed rows restored to a padded batch, in plain torch."""

from torch import Tensor


def unpack(values: Tensor, indices: Tensor, rows: int, padding_value: float) -> Tensor:
    """(total_tokens, ...) → (rows, ...): row ``indices[t]`` is ``values[t]``, every other row holds the padding."""
    padded = values.new_full((rows, *values.shape[1:]), padding_value)
    return padded.index_copy_(0, indices, values)
