"""Whether calling a module does more than its class's forward."""

from torch import nn
from torch.nn.modules import module as torch_module

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    return any(
        not _changes_nothing(hook) for name in HOOKS for hook in getattr(module, name).values()
    )


def has_global_hooks() -> bool:
    return torch_module._has_any_global_hook() and any(
        getattr(hook, "__module__", "") != "torch.utils.module_tracker"  # the FLOP counter's
        for name in HOOKS
        for hook in getattr(torch_module, f"_global{name}").values()
    )


def _changes_nothing(hook) -> bool:
    """Hooks that transformers and PEFT leave behind: they record outputs, or say that embeddings require a gradient.

    The first ones stay after a call that asked for attentions. The others serve reentrant gradient checkpointing.
    """
    home, name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
    return home == "transformers.utils.output_capturing" or (
        home.split(".")[0] in ("transformers", "peft") and "make_inputs_require_grad" in name
    )
