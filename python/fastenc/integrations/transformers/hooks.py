"""Detects what changes the results of a module's calls: hooks, and a forward other than its class's."""

import inspect
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

STATE = "_fastenc_patch"  # attribute of a patched module
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that may change its results."""
    return any(
        not _changes_nothing(hook) for name in HOOKS for hook in getattr(module, name).values()
    )


def has_global_hooks() -> bool:
    """Whether there are hooks of all modules, except those of torch's FLOP counter."""
    return torch_module._has_any_global_hook() and any(
        getattr(hook, "__module__", "") != "torch.utils.module_tracker"
        for name in HOOKS
        for hook in getattr(torch_module, f"_global{name}").values()
    )


def forward_reason(patched: Any) -> str | None:
    """Why a patched module must call its own forward, whatever its class computes, or None."""
    previous, own = patched.__dict__[STATE].previous, type(patched).forward
    # accelerate's unwrap_model leaves the class's forward, bound to the model, without its decorators.
    if previous is None or getattr(previous, "__func__", None) in (own, inspect.unwrap(own)):
        return None
    return "its forward was replaced before it was patched"


def _changes_nothing(hook) -> bool:
    """Whether a hook is one of those that transformers and PEFT leave on a model and that do not change results.

    Hooks that record outputs remain after a call that requested attentions. Hooks that make the embeddings require a
    gradient are for reentrant gradient checkpointing.
    """
    home, name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
    return home == "transformers.utils.output_capturing" or (
        home.split(".")[0] in ("transformers", "peft") and "make_inputs_require_grad" in name
    )
