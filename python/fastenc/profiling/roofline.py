"""The roofline: a lower bound of an op's time from a device's measured peak rates.

    time >= max(bytes / bandwidth of a copy, FLOPs / FLOPs per second of a large matrix product in that dtype)

Source: Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785.
"""

import statistics
from typing import Any, NamedTuple

import torch

from fastenc._base.json_values import JsonObject
from fastenc.ops.gemm import fastest_product
from fastenc.profiling.timing import call_seconds

COPY_BYTES = {"cuda": 2 * 2**30, "cpu": 256 * 2**20}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 2048}
REPEATS = {"cuda": 20, "cpu": 5}


class Work(NamedTuple):
    """The least work of an op.

    Fields:
        bytes: each input read once and each output written once.
        flops: FLOPs of its matrix products; a multiply-add counts as two.
        dtype: of the products.
    """

    bytes: float
    flops: float = 0.0
    dtype: torch.dtype = torch.float32

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]
        return Work(self.bytes + other.bytes, self.flops + other.flops, self.dtype)


class Ceilings:
    """A device's measured peak rates, measured when they are first used.

    The bandwidth is that of a copy, bytes read plus bytes written. An op whose data stay in a cache can be faster.

    Args:
        copy_bytes: size of the copied tensor; None: large enough to fill the device.
        product_size: side of the square matrices; None: large enough to fill the device.
    """

    def __init__(
        self,
        device: torch.device | str,
        copy_bytes: int | None = None,
        product_size: int | None = None,
    ):
        self.device = torch.device(device)
        device_type = self.device.type
        self.copy_bytes = copy_bytes or COPY_BYTES[device_type]
        self.product_size = product_size or PRODUCT_SIZE[device_type]
        self._bandwidth: float | None = None
        self._products: dict[torch.dtype, float] = {}

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a copy, read plus written."""
        if self._bandwidth is None:
            source = torch.randn(self.copy_bytes // 4, device=self.device)
            target = torch.empty_like(source)
            seconds = self._median(lambda: target.copy_(source))
            self._bandwidth = 2 * source.nbytes / seconds
        return self._bandwidth

    def product(self, dtype: torch.dtype) -> float:
        """FLOPs per second of a product of square matrices. They are random, because products of zeros are faster."""
        if dtype not in self._products:
            size = self.product_size
            a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
            seconds = self._median(fastest_product(a, b))
            self._products[dtype] = 2 * size**3 / seconds
        return self._products[dtype]

    def floor(self, work: Work) -> float:
        """The least time of the work in seconds."""
        arithmetic = work.flops / self.product(work.dtype) if work.flops else 0.0
        return max(work.bytes / self.bandwidth, arithmetic)

    def as_json(self) -> JsonObject:
        """The rates that were measured so far."""
        measured: dict[str, Any] = {}
        if self._bandwidth is not None:
            measured["copy_GB_per_s"] = self._bandwidth / 1e9
            measured["copy_MB"] = self.copy_bytes / 1e6
        if self._products:
            measured["product_TFLOP_per_s"] = {
                str(dtype).removeprefix("torch."): rate / 1e12
                for dtype, rate in self._products.items()
            }
            measured["product_size"] = self.product_size
        return measured

    def _median(self, function) -> float:
        repeats = REPEATS[self.device.type]
        call_seconds(function, self.device, max(2, repeats // 4))
        return statistics.median(call_seconds(function, self.device, repeats))
