"""Derivatives that the kernels do not compute: second ones, those of forward mode and of torch.func."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from fastenc.ops.trace_constants import constant_in_trace


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """:func:`torch.autograd.function.once_differentiable`, in which ``create_graph=True`` is an error at once.

    PyTorch's decorator raises its error only if a second backward reaches the function. That of
    ``torch.autograd.grad(gradients, weights)`` may not reach it. Its terms would be missing without an error.
    """
    plain = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "the kernels have no second derivatives, got a backward with create_graph=True: leave it out, or "
                "compute second derivatives without the kernels: of most ops with impl='reference', of a patched model "
                "after fastenc.unpatch(model) and model.set_attn_implementation('eager')"
            )
        return plain(ctx, *gradients)

    return checked


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is on."""
    return forward_ad._current_level >= 0


def reference_reason() -> str | None:
    """Why only the references compute the derivatives that are asked for, or None.

    The kernels have no derivatives in forward mode. PyTorch would take 0 for them without an error.
    """
    if in_forward_mode():
        return "forward-mode differentiation goes through the reference alone"
    if _differentiates_functions():
        return "a gradient of torch.func goes through the reference alone"
    return None


@constant_in_trace
def _differentiates_functions() -> bool:
    functorch = torch._C._functorch
    if functorch.maybe_current_level() is None:
        return False
    transforms = functorch.get_interpreter_stack() or ()
    return any(transform.key() == functorch.TransformType.Grad for transform in transforms)
