"""How several processes hold one model: a replica each (DDP), or a shard of every parameter each (FSDP)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fastenc.models.encoder import EncoderLayer
from fastenc.models.pretrained import PretrainedModel

BuildOptimizer = Callable[[PretrainedModel], torch.optim.Optimizer]


class Parallel(Protocol):
    """Fields:
    model: whose forward and backward train.
    adamw: the optimiser of its parameters; optimizer: what to call in its place.
    """

    model: Any
    adamw: torch.optim.Optimizer
    optimizer: Any

    @property
    def plain_model(self) -> PretrainedModel:
        """The model without wrappers; its parameters are the optimiser's."""
        ...

    def gradient_sync(self, last: bool) -> AbstractContextManager:
        """Around a micro-batch: gradients are synchronised once an optimiser step, after the ``last``."""

    def whole_model(self) -> PretrainedModel | None:
        """The model with all of its weights, on the main process at least; every process has to call."""

    def load(self, state: dict[str, Tensor]) -> None:
        """Take the weights of a whole model's state."""

    def finish(self) -> None:
        """Leave the model as an ordinary one in evaluation mode, as far as it is one."""


class DDP:
    """The whole model on each process, or on the only one (DistributedDataParallel, by accelerate)."""

    def __init__(self, accelerator: Any, model: PretrainedModel, build: BuildOptimizer):
        self.accelerator = accelerator
        # Accelerate's wrapper shares the state of the optimiser in it.
        self.adamw = build(model)
        self.model, self.optimizer = accelerator.prepare(model, self.adamw)

    @property
    def plain_model(self) -> PretrainedModel:
        return self.accelerator.unwrap_model(self.model)

    def gradient_sync(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def whole_model(self) -> PretrainedModel:
        return self.plain_model

    def load(self, state: dict[str, Tensor]) -> None:
        self.plain_model.load_state_dict(state)

    def finish(self) -> None:
        # Without the autocast that accelerate put around its forward.
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False).eval()


class FSDP:
    """An equal part of every parameter's rows, of their gradients and of AdamW's moments on each process (FSDP2).

    A layer's weights are whole on a device while the layer computes; those outside the layers, tied ones among them,
    are one group around everything. The main process keeps a second, whole model on the CPU for evaluation and
    checkpoints.
    Raises: ValueError for a single process.
    Source: Zhao et al. 2023, arXiv:2304.11277; ``torch.distributed.fsdp.fully_shard``.
    """

    def __init__(self, accelerator: Any, model: PretrainedModel, build: BuildOptimizer):
        if accelerator.num_processes == 1:
            raise ValueError(
                "parallel='fsdp' shards the weights over several processes, got 1: start them with "
                "torchrun --nproc-per-node N -m fastenc.cli ..., or leave it out"
            )
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
        self.model: Any = model
        self.plain_model = model
        self.adamw = self.optimizer = build(self.model)

    def gradient_sync(self, last: bool) -> AbstractContextManager:
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

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


def rows_of(tensor: DTensor) -> tuple[int, int]:
    """The rows from start to stop - 1 that this process has of a sharded tensor: its part by ``torch.chunk``."""
    total, processes = tensor.shape[0], tensor.device_mesh.size()
    rows, index = -(-total // processes), tensor.device_mesh.get_local_rank()
    return min(index * rows, total), min((index + 1) * rows, total)
