"""Vectors in 8 bits or one bit a dimension, which an index stores in a fourth or a thirty-second of the memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

RANGED = ("int8", "uint8")  # each dimension is scaled by its range
PRECISIONS = ("float32", *RANGED, "binary", "ubinary")


def quantize_vectors(
    vectors: Tensor, precision: str, ranges: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Vectors in another precision, the numbers of sentence-transformers' ``quantize_embeddings``.

        uint8:   q = clamp(floor((x - low) / step), 0, 255), step = (high - low) / 255, or 1 where that is 0
        int8:    q - 128
        ubinary: a bit for each dimension, 1 where x > 0; eight to a byte, the first in the highest bit
        binary:  the bytes of ubinary - 128

    Args:
        vectors: (texts, width), floating point.
        precision: one of :data:`PRECISIONS`; "float32" returns the vectors as they are.
        ranges: for int8 and uint8 the lowest and the highest value of each dimension, each (width,); None: those of
            ``vectors``. Queries need the ranges of the corpus that they are compared with.
    Returns: (texts, width) of int8 or uint8, or (texts, ceil(width / 8)) for "binary" (int8) and "ubinary" (uint8).
    Raises: ValueError for another precision, and for int8 or uint8 without ranges if there are fewer than two vectors.
    """
    check_precision(precision)
    if precision == "float32":
        return vectors
    if precision.endswith("binary"):
        bits = F.pad((vectors > 0).byte(), (0, -vectors.shape[1] % 8)).unflatten(1, (-1, 8))
        places = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], device=vectors.device)
        q = (bits * places).sum(2)
    else:
        if ranges is None:
            check_texts(precision, vectors.shape[0])
            ranges = vectors.aminmax(dim=0)
        x, low, high = (each.to(vectors.device, torch.float32) for each in (vectors, *ranges))
        step = (high - low) / 255
        q = ((x - low) / step.where(step != 0, 1)).floor().clamp(0, 255)
    return q.byte() if precision.startswith("u") else (q - 128).to(torch.int8)


def check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}: give one of them"
        )


def check_texts(precision: str, number: int) -> None:
    """Raises: ValueError for a precision that measures ranges, which one vector does not have."""
    if precision in RANGED and number < 2:
        raise ValueError(
            f"{precision} measures the range of each dimension over the texts of the call, got {number}: give more "
            "texts, take binary, or call quantize_vectors with the ranges of your corpus"
        )
