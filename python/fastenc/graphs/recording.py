"""Recording of CUDA graphs, shared by inference and training."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastenc._base.transfer import staged
from fastenc.packing import PackedBatch

# A recorder runs the function at least once. It returns the function's result, and a function that computes the result
# again into the same tensors.
Recorder = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


def check_limits(**limits: int) -> None:
    """Raise ValueError for a limit below 1."""
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


class CudaGraphRecorder:
    """Records functions as CUDA graphs, which share one memory pool.

    Sharing is safe, because graphs are replayed one after another on one stream, and because their inputs and outputs
    stay allocated: a later recording can reuse only the memory of an earlier one's intermediate tensors.

    Args: what: a name of the functions for error messages.
    """

    def __init__(self, device: torch.device, what: str) -> None:
        self._device, self._what = device, what
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        with torch.cuda.device(self._device):
            return self._record(run)

    def _record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # These runs compile kernels and let libraries allocate workspaces, which is not possible in a recording.
            run(), run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local", because other threads, such as data loaders, may pin memory during the recording.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = run()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._what} cannot be recorded as a CUDA graph ({error}): run it without graphs"
            ) from error
        return output, graph.replay


def graph_recorder(device: torch.device, what: str) -> Recorder | None:
    """A :class:`CudaGraphRecorder` for this device; None on a CPU, which launches no kernels."""
    return CudaGraphRecorder(device, what) if device.type == "cuda" else None


class WeightAddresses:
    """The addresses of a model's weights and buffers, which graphs read, and which of them require a gradient."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = [
            (table, name, tensor, tensor.data_ptr(), tensor.requires_grad)
            for module in model.modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]

    def changed(self) -> bool:
        """Whether a weight is another tensor, has another address, or was frozen or unfrozen."""
        return any(
            table.get(name) is not tensor
            or tensor.data_ptr() != address
            or tensor.requires_grad != trained
            for table, name, tensor, address, trained in self._tensors
        )


def copied(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """A copy of the batch on the device, as the input of a graph."""
    tensors: dict[str, Any] = {
        name: value.to(device, copy=True)
        for name, value in vars(batch).items()
        if isinstance(value, Tensor)
    }
    return replace(batch, **tensors)


def overwrite(batch: PackedBatch, values: PackedBatch) -> None:
    """Copy ``values``, a batch of the same shape, into the tensors of ``batch``, which :func:`copied` made."""
    for name, value in vars(values).items():
        if isinstance(value, Tensor):
            target = getattr(batch, name)
            target.copy_(staged(value, target.device), non_blocking=True)
