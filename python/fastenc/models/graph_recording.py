"""What CUDA graphs of inference and of training have in common."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastenc._transfer import staged
from fastenc.packing import PackedBatch

# A recorder runs the function once or more, and returns its result and what computes that again in the same tensors.
Recorder = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


def check_limits(**limits: int) -> None:
    """Raise ValueError for a limit below 1."""
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


class CudaGraphRecorder:
    """Records a function as a CUDA graph; all graphs share one memory pool. ``what`` names it in an error.

    That is safe because replays follow one another on one stream, and because inputs and outputs stay allocated while
    their graph lives: what a later recording may reuse is only what an earlier one needed in between.
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
            # Compiles kernels and makes libraries allocate their workspaces, neither of which can be recorded.
            run(), run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may pin memory meanwhile, as data loaders do.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = run()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._what} cannot be recorded as a CUDA graph ({error}): run it without graphs"
            ) from error
        return output, graph.replay


class WeightAddresses:
    """The addresses of a model's weights, which a recording reads at every replay, and which of them are trained."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
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
            for table, name, tensor, address, trained in self._places
        )


def copied(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """A copy of the batch, which recordings read."""
    tensors: dict[str, Any] = {
        name: value.to(device, copy=True)
        for name, value in vars(batch).items()
        if isinstance(value, Tensor)
    }
    return replace(batch, **tensors)


def overwrite(batch: PackedBatch, values: PackedBatch) -> None:
    """Put another batch of the same shape into the tensors of :func:`copied`."""
    for name, value in vars(values).items():
        if isinstance(value, Tensor):
            own = getattr(batch, name)
            own.copy_(staged(value, own.device), non_blocking=True)
