"""freeze and unfreeze: inference that packs or stacks the weights once, not in every call."""

from typing import TypeVar

from torch import nn

from fastenc.integrations.transformers.patching import owner_of_weights
from fastenc.nn.frozen_weights import FrozenWeights, WeightsOwner

Model = TypeVar("Model", bound=nn.Module)


def freeze(model: Model) -> Model:
    """Prepare the weights for the kernels once, on the promise that they do not change. Returns the model.

    Without this, inference on a CPU packs the layers' weights for the kernels in every call. On other devices it stacks
    the weights of q, k and v in every call, if they are three tensors. A frozen model keeps these copies, which are at
    most as large as its layers' weights, and computes with them. If a weight is changed, the frozen model does not see
    it. :func:`unfreeze`, ``model.train()``, a call with gradients, ``model.to(...)`` and ``load_state_dict`` unfreeze
    the model.

    Args:
        model: an encoder or a model with an encoder, or a Hugging Face model that :func:`fastenc.patch` has patched.
    Raises: ValueError in training mode, and for a model that is neither.
    """
    if getattr(model, "training", False):
        raise ValueError("freeze is for inference, got a model in training mode: call eval() first")
    for owner, frozen in _frozen_weights(model):
        frozen.freeze(owner)
    return model


def unfreeze(model: Model) -> Model:
    """Drop the copies of the weights that :func:`freeze` made. Returns the model."""
    for _, frozen in _frozen_weights(model):
        frozen.drop()
    return model


def _frozen_weights(model: nn.Module) -> list[tuple[WeightsOwner, FrozenWeights]]:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    pairs = [
        (owner_of_weights(module), child)
        for module in modules
        for child in module.children()
        if isinstance(child, FrozenWeights)
    ]
    if not pairs:
        raise ValueError(
            "freeze needs a fastenc model, or a Hugging Face model that fastenc.patch has patched, "
            f"got {type(model).__name__}"
        )
    return pairs
