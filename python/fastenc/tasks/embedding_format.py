"""How vectors stand in a file: their precision, number type and the bytes around them."""

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastenc._base.extras import require
from fastenc.models.embedding.quantization import RANGED, check_precision, quantize_vectors

OUTPUTS = (".safetensors", ".npy", ".parquet")
STORED = {"float32": torch.float32, "float16": torch.float16}
SAFETENSORS = {"float32": "F32", "float16": "F16", "int8": "I8", "uint8": "U8"}
ROWS_AT_ONCE = 10_000  # vectors that are read, or rows that are written, at once

Ranges = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class VectorFormat:
    """How vectors stand in a file.

    Fields:
        suffix: of the file, one of :data:`OUTPUTS`.
        dimensions: numbers in a vector of the model.
        store_as: "float32" or "float16".
        precision, ranges: see :func:`fastenc.models.quantize_vectors`.
    Raises: ValueError for other values, and for float16 with a precision that has another number type.
    """

    suffix: str
    dimensions: int
    store_as: str = "float32"
    precision: str = "float32"
    ranges: Ranges | None = None

    def __post_init__(self) -> None:
        if self.suffix not in OUTPUTS:
            raise ValueError(
                f"output must end in {' or '.join(OUTPUTS)}, got {self.suffix!r}: rename it"
            )
        if self.store_as not in STORED:
            raise ValueError(
                f"store_as must be {' or '.join(STORED)}, got {self.store_as!r}: give one of them"
            )
        check_precision(self.precision)
        if self.precision != "float32" and self.store_as != "float32":
            raise ValueError(
                f"store_as is the number type of precision float32, got {self.store_as} with {self.precision}: leave "
                "out one of them"
            )
        if self.ranges is not None and self.precision not in RANGED:
            raise ValueError(
                f"calibration must come with precision {' or '.join(RANGED)}, got {self.precision}: leave it out"
            )

    @property
    def lacks_ranges(self) -> bool:
        """Whether the numbers depend on vectors that are not computed yet."""
        return self.precision in RANGED and self.ranges is None

    @property
    def width(self) -> int:
        """Numbers in a stored vector."""
        return -(-self.dimensions // 8) if self.precision.endswith("binary") else self.dimensions

    @property
    def dtype(self) -> str:
        """The name of the stored numbers' type."""
        if self.precision == "float32":
            return self.store_as
        return "uint8" if self.precision.startswith("u") else "int8"

    def numbers(self, vectors: Tensor, first: int = 0) -> Any:
        """Vectors as an array of stored numbers, without a copy of float32 ones on the CPU.

        Args:
            vectors: (rows, dimensions).
            first: number of the first vector, for the error.
        Raises: ValueError for a vector that float16 cannot hold.
        """
        exact = vectors.float().cpu()
        if self.precision != "float32":
            return quantize_vectors(exact, self.precision, self.ranges).numpy()
        stored = exact.to(STORED[self.store_as])
        lost = stored.isinf().any(1) & exact.isfinite().all(1)
        if lost.any():
            raise ValueError(
                f"store_as must be float32 for these vectors, got float16: text {first + int(lost.nonzero()[0]) + 1:,} "
                f"has a number beyond {torch.finfo(stored.dtype).max:,.0f}: give float32, or normalise the vectors"
            )
        return stored.numpy()

    def header(self, rows: int) -> bytes:
        """The bytes before the first vector."""
        if self.suffix == ".parquet":
            return b""  # the table is made at the end, from a file of vectors alone
        numpy = require("numpy", extra="train")
        if self.suffix == ".npy":
            head = io.BytesIO()
            description = {
                "descr": numpy.dtype(self.dtype).newbyteorder("<").str,
                "fortran_order": False,
                "shape": (rows, self.width),
            }
            numpy.lib.format.write_array_header_1_0(head, description)
            return head.getvalue()
        # Eight bytes hold the length of the JSON after them. Spaces pad the JSON so that the vectors begin at a
        # multiple of eight bytes.
        entry = {
            "dtype": SAFETENSORS[self.dtype],
            "shape": [rows, self.width],
            "data_offsets": [0, numpy.dtype(self.dtype).itemsize * rows * self.width],
        }
        text = json.dumps({"embeddings": entry}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def blocks_of(path: Path, dtype: str, width: int) -> Iterator[Any]:
    """Arrays of the vectors of a file that holds nothing else: :data:`ROWS_AT_ONCE` each, fewer in the last one."""
    numpy = require("numpy", extra="train")
    with open(path, "rb") as file:
        while len(block := numpy.fromfile(file, dtype, ROWS_AT_ONCE * width)):
            yield block.reshape(-1, width)


def ranges_of(blocks: Iterable[Any]) -> Ranges:
    """The lowest and the highest value of each dimension in arrays of vectors."""
    lows, highs = zip(*(torch.from_numpy(block).aminmax(dim=0) for block in blocks), strict=True)
    return torch.stack(lows).amin(0), torch.stack(highs).amax(0)


def read_ranges(path: Path, width: int) -> Ranges:
    """The lowest and the highest value of each dimension in a .npy file of vectors, such as a file of ranges.

    Raises: ValueError for another file, another width, fewer than two vectors and infinite values.
    """
    numpy = require("numpy", extra="train")
    try:
        vectors = numpy.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ValueError(
            f"calibration must be a .npy file of vectors, got {path} ({error}): give another file"
        ) from error
    if (
        vectors.dtype.kind != "f"
        or vectors.ndim != 2
        or len(vectors) < 2
        or vectors.shape[1] != width
    ):
        raise ValueError(
            f"calibration must hold two or more vectors of {width} floating-point numbers, got {vectors.dtype} "
            f"{vectors.shape} in {path}: embed a sample of the corpus without precision"
        )
    low, high = (
        torch.from_numpy(each.astype("float32")) for each in (vectors.min(0), vectors.max(0))
    )
    if not (low.isfinite().all() and high.isfinite().all()):
        raise ValueError(
            f"calibration must hold finite numbers, got others in {path}: give another file"
        )
    return low, high


def write_array(path: Path, values: Tensor) -> None:
    """Write a .npy file of any name."""
    numpy = require("numpy", extra="train")
    with open(path, "wb") as file:
        numpy.save(file, values.numpy())
