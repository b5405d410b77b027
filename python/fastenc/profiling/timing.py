"""Measures the time of a call on a CPU or a GPU."""

import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 * 2**20


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work. On a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_seconds(function: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of ``repeats`` consecutive calls, from the start until the work is finished."""
    if device.type == "cuda":
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in events:
            start.record()
            function()
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) / 1e3 for start, end in events]
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return seconds


class KernelTimer:
    """Device time of a call on a GPU: its kernels without gaps between them, with a cold L2 cache.

    Before each call a buffer of several times the cache's size is read. It is not written, because the cache would
    write it back to memory during the call. Then the device is kept busy while the host queues the call.
    """

    def __init__(self, device: torch.device):
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.device = device
        self.flushed = torch.ones(max(FLUSH_BYTES, 4 * cache) // 4, device=device)
        self.sink = torch.zeros((), device=device)
        cycles = 20_000_000
        torch.cuda._sleep(cycles)
        self.cycles_per_second = cycles / min(
            call_seconds(lambda: torch.cuda._sleep(cycles), device, 3)
        )

    def seconds(
        self,
        function: Callable[..., object],
        repeats: int,
        host_seconds: float,
        prepare: Callable[[], object] | None = None,
    ) -> list[float]:
        """Seconds of each call.

        Args:
            host_seconds: about how long the host needs to queue one call.
            prepare: called, untimed, before each call; its result is the call's argument.
        """
        wait = int((1.5 * host_seconds + 50e-6) * self.cycles_per_second)

        def cold() -> None:
            torch.sum(self.flushed, dim=0, out=self.sink)
            torch.cuda._sleep(wait)

        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in events:
            arguments = () if prepare is None else (prepare(),)
            cold()
            start.record()
            function(*arguments)
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) / 1e3 for start, end in events]
