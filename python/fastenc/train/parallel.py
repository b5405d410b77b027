"""How several processes train one model: each has a replica (DDP), or a shard of every parameter (FSDP)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastenc.models.layer_stack import EncoderLayer
from fastenc.models.pretrained import PretrainedModel

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.tensor import DTensor  # importing it takes over a second

BuildOptimizer = Callable[[PretrainedModel], torch.optim.Optimizer]


class Parallel(Protocol):
    """A way to train one model with several processes.

    Fields:
        model: the model whose forward and backward are called, perhaps wrapped.
        adamw: the optimiser of its parameters.
        optimizer: the same, perhaps wrapped; its step is called.
    """

    model: nn.Module
    adamw: torch.optim.Optimizer
    optimizer: Any

    @property
    def plain_model(self) -> PretrainedModel:
        """The model without wrappers; its parameters are the optimiser's."""
        ...

    def gradient_sync(self, last: bool) -> AbstractContextManager:
        """A context for a micro-batch. Gradients are synchronised in the ``last`` micro-batch of an optimiser step."""

    def whole(self, tensor: Tensor) -> Tensor:
        """The value of a tensor that may be sharded, such as the gradient norm. Every process must call it."""

    def whole_model(self) -> PretrainedModel | None:
        """The model with all its weights on the main process, else perhaps None. Every process must call it."""

    def load(self, state: dict[str, Tensor]) -> None:
        """Load the weights of a whole model's state dict."""

    def finish(self) -> None:
        """Put the model into evaluation mode and remove wrappers."""


class DDP:
    """Each process has the whole model (DistributedDataParallel, by accelerate). It also serves a single process."""

    def __init__(self, accelerator: "Accelerator", model: PretrainedModel, build: BuildOptimizer):
        self.accelerator = accelerator
        # Accelerate's wrapper has the same state as the optimiser that it wraps.
        self.adamw = build(model)
        self.model, self.optimizer = accelerator.prepare(model, self.adamw)

    @property
    def plain_model(self) -> PretrainedModel:
        return self.accelerator.unwrap_model(self.model)

    def gradient_sync(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def whole_model(self) -> PretrainedModel:
        return self.plain_model

    def load(self, state: dict[str, Tensor]) -> None:
        self.plain_model.load_state_dict(state)

    def finish(self) -> None:
        # This also removes the autocast that accelerate put around the forward.
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False).eval()


class FSDP:
    """Each process has an equal number of the rows of every parameter, gradient and moment of AdamW (FSDP2).

    A layer's weights are gathered on each device while the layer computes. The parameters outside the layers, tied ones
    included, form one more group, which is gathered during the whole forward and backward. The main process keeps a
    second, whole model on the CPU for evaluation and checkpoints.
    Raises: ValueError for a single process.
    Source: Zhao et al. 2023, arXiv:2304.11277; ``torch.distributed.fsdp.fully_shard``.
    """

    def __init__(self, accelerator: "Accelerator", model: PretrainedModel, build: BuildOptimizer):
        if accelerator.num_processes == 1:
            raise ValueError(
                "parallel='fsdp' shards the weights over several processes, got 1: start them with "
                "torchrun --nproc-per-node N -m fastenc ..., or leave it out"
            )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.device = accelerator.device
        self._copy = deepcopy(model) if accelerator.is_main_process else None
        model.to(self.device)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        mesh = init_device_mesh(self.device.type, (accelerator.num_processes,))
        for module in model.modules():
            if isinstance(module, EncoderLayer):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model: Any = model  # an FSDPModule, whose parameters are DTensors
        self.plain_model = model
        self.adamw = self.optimizer = build(self.model)

    def gradient_sync(self, last: bool) -> AbstractContextManager:
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def whole(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @torch.no_grad()
    def whole_model(self) -> PretrainedModel | None:
        for name, parameter in self.model.named_parameters():
            full = parameter.full_tensor()
            if self._copy is not None:
                self._copy.get_parameter(name).copy_(full)
        return self._copy

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            start, stop = rows_of(parameter)
            parameter.to_local().copy_(state[name][start:stop])

    def finish(self) -> None:
        self.model.eval()


PARALLEL: dict[str, Callable[..., Parallel]] = {"ddp": DDP, "fsdp": FSDP}


def rows_of(tensor: "DTensor") -> tuple[int, int]:
    """The rows [start, stop) of a sharded tensor that this process has, as ``torch.chunk`` divides them."""
    total, processes = tensor.shape[0], tensor.device_mesh.size()
    rows, index = -(-total // processes), tensor.device_mesh.get_local_rank()
    return min(index * rows, total), min((index + 1) * rows, total)
