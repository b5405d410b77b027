"""freeze and unfreeze: inference without packing or stacking weights in every call."""

from typing import Any

from torch import nn

from fastenc.integrations.transformers.patching import owner_of_weights
from fastenc.nn.frozen_weights import FrozenWeights


def freeze(model: Any) -> Any:
    """Promise that a model's weights do not change, and return the model.

    In inference on a CPU the layers' weights are packed for the kernels in every call; elsewhere those of q, k and v
    are stacked, where they are three tensors. A frozen model keeps these copies, at most as large as its layers'
    weights, and reads those alone: a weight that is changed afterwards is not seen until the model is unfrozen.
    :func:`unfreeze`, ``model.train()``, a call with gradients, ``model.to(...)`` and ``load_state_dict`` end it.

    Args:
        model: an encoder or a model over one, or a Hugging Face model that :func:`fastenc.patch` has patched.
    Raises: ValueError in training mode, and for a model that has nothing to freeze.
    """
    if getattr(model, "training", False):
        raise ValueError("freeze is for inference, got a model in training mode: call eval() first")
    for owner, frozen in _frozen_weights(model):
        frozen.freeze(owner)
    return model


def unfreeze(model: Any) -> Any:
    """End :func:`freeze`, and return the model."""
    for _, frozen in _frozen_weights(model):
        frozen.drop()
    return model


def _frozen_weights(model: Any) -> list[tuple[Any, FrozenWeights]]:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = [
        (owner_of_weights(module), child)
        for module in modules
        for child in module.children()
        if isinstance(child, FrozenWeights)
    ]
    if not found:
        raise ValueError(
            "freeze needs a fastenc model, or a Hugging Face model that fastenc.patch has patched, "
            f"got {type(model).__name__}"
        )
    return found
