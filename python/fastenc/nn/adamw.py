"""AdamW that writes the parameters' copies in autocast's dtype together with the parameters."""

import os
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastenc.nn import weight_copies
from fastenc.ops.adamw import adamw_count, adamw_step, adamw_tables
from fastenc.ops.library import HAS_TRITON

IMPLEMENTATION = {"fused": True, "foreach": None, "capturable": False}
UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "capturable")


class AdamW(torch.optim.AdamW):
    """:class:`torch.optim.AdamW` for float32 parameters on a GPU, with one kernel for each group of parameters.

    The forward under autocast multiplies by copies of the weights in bfloat16. The kernel of the step writes these
    copies too, so that the next forward does not cast the weights again. State and state dict are those of
    ``torch.optim.AdamW(fused=True)``: either loads the other's.

    A change of a parameter through ``parameter.data`` is not noticed: call :meth:`forget_copies` after it. After any
    other change the forward casts the weight. A backward after the step through a forward before it raises torch's
    error for a change in place.

    Args: those of torch.optim.AdamW.
    Attributes: copies: autocast's dtype. found_inf: float32 tensor; where it is 1, a step changes nothing. May be set.
    Raises: ValueError in ``step`` for a parameter that is not contiguous float32, for parameters on several devices,
        for a learning rate that is a tensor, and for amsgrad, maximize, differentiable and capturable.
    Numerics: fp32, within the rounding of torch's kernel. Deterministic: yes.
    Source: Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    copies: torch.dtype = torch.bfloat16
    _tables: "_Tables | None" = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)
        self._step_supports_amp_scaling = False  # so that torch's GradScaler scales back itself

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        parameters = self.param_groups[-1]["params"]
        weight_copies.watch(parameters)
        weakref.finalize(self, weight_copies.unwatch, list(parameters)).atexit = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch.optim.AdamW, whichever implementation it stepped with."""
        groups = [{**group, **IMPLEMENTATION} for group in state_dict["param_groups"]]
        # As a fused optimiser's, the step counts go to the parameters' device.
        super().load_state_dict({**state_dict, "param_groups": groups})

    def forget_copies(self) -> None:
        """Drop the copies of all parameters; the next forward makes new ones."""
        weight_copies.forget(p for group in self.param_groups for p in group["params"])

    def release(self) -> None:
        """Drop the copies at the end of training, and write no more. The optimiser's end does the same."""
        weight_copies.unwatch(p for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have a gradient. Returns: the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [self._tensors_of(group) for group in self.param_groups]
        updated = [tensors for group in groups for tensors in group]
        if not updated:
            return loss
        devices = {tensors.parameter.device for tensors in updated}
        if len(devices) > 1:
            raise ValueError(
                f"this AdamW takes parameters on one device, got {', '.join(sorted(map(str, devices)))}: use "
                "torch.optim.AdamW"
            )
        tables = self._tables_of(updated)
        gradients = _addresses([tensors.gradient for tensors in updated])
        aligned = tables.aligned and all(address % 16 == 0 for address in gradients)
        (device,) = devices
        pinned = torch.tensor(gradients, pin_memory=device.type == "cuda")
        on_device = pinned.to(device, non_blocking=True)
        found_inf = getattr(self, "found_inf", None)
        adamw_count(tables.tensors, found_inf)
        done = 0
        for group, tensors in zip(self.param_groups, groups, strict=True):
            first, end = tables.first_blocks[done], tables.first_blocks[done + len(tensors)]
            done += len(tensors)
            if first == end:
                continue
            adamw_step(
                tables.tensors, on_device, tables.blocks, found_inf, first, end - first,
                group["lr"], group["betas"], group["eps"], group["weight_decay"],
                self.copies, aligned,
            )  # fmt: skip
        weight_copies.written([t.parameter for t in updated], [t.copy for t in updated])
        return loss

    def _tensors_of(self, group: dict[str, Any]) -> list["_Tensors"]:
        """The tensors of each parameter of a group that has a gradient.

        Raises: ValueError for what the kernel does not support.
        """
        for name in UNSUPPORTED:
            if group[name]:
                raise ValueError(
                    f"this AdamW does not support {name}, got {group[name]}: use torch.optim.AdamW"
                )
        if isinstance(group["lr"], Tensor):
            raise ValueError(
                "this AdamW takes a learning rate that is a number, got a tensor: use torch.optim.AdamW"
            )
        state: tuple[list[Tensor], ...] = ([], [], [], [], [], [])
        self._init_group(group, *state)
        parameters, gradients, means, squares, _, steps = state
        for tensor in (*parameters, *means, *squares):
            if not _is_plain(tensor):
                raise ValueError(
                    "this AdamW takes contiguous tensors of float32 as parameters and moments, got "
                    f"{type(tensor).__name__} of {tensor.dtype}, shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()}: use torch.optim.AdamW"
                )
        copies = [weight_copies.current(parameter, self.copies) for parameter in parameters]
        gradients = [gradient.contiguous() for gradient in gradients]
        rows = zip(parameters, gradients, means, squares, steps, copies, strict=True)
        return [_Tensors(*row) for row in rows]

    def _tables_of(self, updated: list["_Tensors"]) -> "_Tables":
        """The tables on the device, made anew when a tensor has another address."""
        key = tuple(
            tuple(_addresses([t.parameter, t.mean, t.square, t.step, t.copy])) for t in updated
        )
        if self._tables is None or self._tables.key != key:
            sizes = [t.parameter.numel() for t in updated]
            tensors, blocks, starts = adamw_tables(list(key), sizes, updated[0].parameter)
            aligned = all(a % 16 == 0 for p, m, v, _, copy in key for a in (p, m, v, copy))
            self._tables = _Tables(key, tensors, blocks, starts, aligned)
        return self._tables


def adamw(
    params: Iterable[Any], device: torch.device, autocast: torch.dtype | None, **options: Any
) -> torch.optim.AdamW:
    """The optimiser for steps on this device under this autocast: :class:`AdamW` for bfloat16 on a GPU, else torch's.

    Args:
        params, options: those of torch.optim.AdamW.
        device: where the parameters will be when the steps run.
        autocast: the dtype, or None without autocast.
    """
    params = list(params)
    groups = [p["params"] if isinstance(p, dict) else [p] for p in params]
    if autocast == torch.bfloat16 and runs_on(device) and all(map(_is_plain, chain(*groups))):
        return AdamW(params, **options)
    return torch.optim.AdamW(params, fused=True, **options)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on this device. The environment variable FASTENC_ADAMW=0 keeps torch's."""
    if device.type != "cuda" or not HAS_TRITON or os.environ.get("FASTENC_ADAMW") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _is_plain(tensor: Tensor) -> bool:
    kinds = (Tensor, torch.nn.Parameter)
    return type(tensor) in kinds and tensor.dtype == torch.float32 and tensor.is_contiguous()


class _Tensors(NamedTuple):
    """A parameter and what its update reads and writes; ``copy`` is None before the first forward."""

    parameter: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor
    copy: Tensor | None


class _Tables(NamedTuple):
    """What the kernels read; see kernels/adamw.py. ``key``: the addresses from which it was made."""

    key: tuple[tuple[int, ...], ...]
    tensors: Tensor
    blocks: Tensor
    first_blocks: list[int]
    aligned: bool


def _addresses(tensors: list[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
