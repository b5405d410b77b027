"""freeze and unfreeze: inference that packs or stacks the weights once, not in every call."""

from typing import Any, TypeVar

from torch import nn

from fastenc.integrations.transformers.patching import owner_of_weights
from fastenc.nn.frozen_copies import FrozenCopies, copies_in

Model = TypeVar("Model", bound=nn.Module)


def freeze(model: Model, *, dtype: str | None = None) -> Model:
    """Prepare the weights for the kernels once, on the promise that they do not change. Returns the model.

    Without this, inference on a CPU copies the layers' weights into the order of the kernels (packs them) in every
    call. On other devices the weights of q, k and v are stacked in every call, if they are three tensors. A frozen
    model keeps these copies, which are at most as large as its layers' weights, and computes with them. Do not change
    the weights of a frozen model: the change may have no effect. :func:`unfreeze`, ``model.train()``, a call with
    gradients, ``model.to(...)`` and ``load_state_dict`` unfreeze the model, and so do another linear layer and PEFT's
    merging or removal of LoRA in a patched one. A copy is not frozen, nor is a copy that is pickled for another
    process.

    With ``dtype="int8"`` the copies are in 8 bits, and so are the operands of the layers' matrix products on a CPU. A
    weight w and the rows x that it multiplies become

        w = scale_w q_w, q_w in -127..127, scale_w for each output;
        x = low + scale_x q_x, q_x in 0..255, low and scale_x for each row and group of at most 384 columns, measured
        in the call.

    Everything between the products is computed as before, except attention: it is in bfloat16 with AMX, and on AMD's
    processors with AVX512-BF16. A text's vector does not depend on the batch or the number of threads. The output layer
    of an encoder-decoder is in 8 bits, too, but not for the loss. The model keeps its float32 weights;
    ``Encoder.from_pretrained(..., dtype="int8")`` drops them.

    Args:
        model: an encoder, a model with an encoder or with encoder and decoder, or a Hugging Face model that
            :func:`fastenc.patch` has patched.
        dtype: None, the weights' own, or "int8". int8 needs AVX2, and on a processor with AVX-512 also
            AVX512-VNNI.
    Raises: ValueError in training mode, for a model that is neither fastenc's nor patched, and for an unknown dtype.
        For "int8" also on another processor or a GPU, for weights that are not float32 or not finite, widths that are
        no multiples of 16, and LoRA that is not merged.
    """
    owners = _frozen_copies(model, "freeze")
    if getattr(model, "training", False):
        raise ValueError("freeze is for inference, got a model in training mode: call eval() first")
    # All of them, before any is kept.
    copies = [frozen.copies_of(owner, dtype) for owner, frozen in owners]
    for (_, frozen), of_owner in zip(owners, copies, strict=True):
        frozen.keep(of_owner)
    return model


def unfreeze(model: Model) -> Model:
    """Drop the copies of the weights that :func:`freeze` made. Returns the model.

    Raises: ValueError for a model that is neither fastenc's nor patched, and for one that was loaded in int8.
    """
    for _, frozen in _frozen_copies(model, "unfreeze"):
        frozen.drop()
    return model


def _frozen_copies(model: nn.Module, caller: str) -> list[tuple[Any, FrozenCopies]]:
    """Each owner of weights, and what keeps copies of these."""
    found = copies_in(model) if isinstance(model, nn.Module) else ()
    pairs = [(owner_of_weights(module), frozen) for module, frozen in found]
    if not pairs:
        raise ValueError(
            f"{caller} needs a fastenc model, or a patched Hugging Face model, got {type(model).__name__}: call "
            "fastenc.patch(model) first"
        )
    return pairs
