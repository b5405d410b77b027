"""The state of a patched module, and the warning of a call that takes the module's own forward."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from fastenc.integrations.transformers import encoder_decoder
from fastenc.integrations.transformers.hooks import STATE
from fastenc.integrations.transformers.live_encoder import architecture_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PatchState:
    """The state of a patched module.

    Attributes:
        fused: the function that is called instead of the module's own forward.
        previous: a forward that the instance had as an attribute before it was patched, or None.
        labelled_logits_only: see :func:`patch`.
        encoder: the :class:`LiveEncoder`, if the module is an encoder.
        frozen: where :func:`fastenc.freeze` keeps copies of weights that the module's forward reads, or None.
        head: the :class:`live_head.LiveHead` of a masked-LM head, or of one that reads the first token alone.
        warned: the reasons for taking the own forward of which the user was warned.
    """

    def __init__(self, fused: Callable[..., Any], previous: Any):
        self.fused = fused
        self.previous = previous
        self.labelled_logits_only = False
        self.encoder: Any = None
        self.frozen: Any = None
        self.head: Any = None
        self.warned: set[str] = set()


def state_of(module: Any) -> PatchState | None:
    """The state of a patched module; None: it is not patched."""
    return module.__dict__.get(STATE)


def encoder_in(top: "PreTrainedModel") -> "PreTrainedModel":
    """The encoder of a model of transformers, which may be the model itself."""
    if encoder_decoder.architecture_of(top) is not None:
        return cast("PreTrainedModel", encoder_decoder.stacks_of(top)[0])
    base = top.base_model
    architecture = architecture_of(base)
    encoder = base if architecture is None else base.get_submodule(architecture.live_path)
    return cast("PreTrainedModel", encoder)


def warn_once(model: "PreTrainedModel", state: PatchState, reason: str) -> None:
    """Warn of a reason for taking the own forward, if the user was not warned of it before."""
    if reason not in state.warned:
        state.warned.add(reason)
        warnings.warn(
            f"fastenc: {type(model).__name__} takes its own forward, because {reason}", stacklevel=4
        )
