"""Copies of weights that a module keeps on the promise that the weights do not change, and what ends the promise."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fastenc.ops.derivatives import in_forward_mode

INT8 = "int8"
LARGEST_WEIGHT = 1e35  # in 8 bits: the kernels sum up to 384 weights in float32

Owner_contra = TypeVar("Owner_contra", contravariant=True)
Copies = TypeVar("Copies")


class FrozenCopies(nn.Module, Generic[Owner_contra, Copies]):
    """The copies of one owner's weights; without any, the owner computes with its weights.

    They are dropped by all that may change the weights: ``train()``, a call with gradients, moving to another device or
    dtype, loading a state dict. A copy of the model does not have them.

    They may be all that a model has of these weights. Then nothing drops them, and what needs the weights is an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: Copies | None = None
        self._replaces_weights = False

    def copies_of(self, owner: Owner_contra, dtype: str | None) -> Copies | None:
        """The copies of the owner's weights, in 8 bits if ``dtype`` is "int8". None: copies would not be faster."""
        raise NotImplementedError

    def replace_weights(self, owner: Owner_contra) -> None:
        """Freeze in 8 bits, for as long as the model lives."""
        raise NotImplementedError

    def keep(self, copies: Copies | None) -> None:
        """Freeze: keep what :meth:`copies_of` made."""
        self._copies = copies

    def require_weights(self, what: str) -> None:
        """Raises: ValueError if these copies are all that the model has of its weights."""
        if self._replaces_weights:
            raise ValueError(
                f'{what} needs the weights in float32, this model was loaded with dtype="int8" and has them in 8 bits '
                "only: load it without dtype"
            )

    def check_move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Raises: ValueError if ``fn``, applied to every tensor of the model, would end computing in 8 bits."""
        if self._replaces_weights:
            moved = fn(torch.empty(0))
            if moved.device.type != "cpu" or moved.dtype != torch.float32:
                self.require_weights(f"moving to {moved.device.type} and {moved.dtype}")

    def drop(self) -> None:
        self.require_weights("unfreeze")
        self._copies = None

    def drop_in_call_with_gradients(self) -> None:
        """Drop the copies if this call computes gradients: the optimizer's step after it changes the weights.

        Every call of the owner must come here, whichever forward runs.
        """
        if torch.is_grad_enabled() or in_forward_mode():
            self.require_weights("a call with gradients (without torch.no_grad())")
            self.drop()

    def current(self) -> Copies | None:
        """The copies that this call may use; None: none."""
        self.drop_in_call_with_gradients()
        if torch.is_grad_enabled() or (
            torch.compiler.is_compiling() and not self._replaces_weights
        ):
            return None
        return self._of_call()

    def _of_call(self) -> Copies | None:
        return self._copies

    def train(self, mode: bool = True) -> "FrozenCopies":
        if mode:
            self.require_weights("train()")
            self.drop()
        return super().train(mode)

    def _apply(self, fn, recurse: bool = True):
        self.check_move(fn)
        if not self._replaces_weights:
            self.drop()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self.require_weights("load_state_dict")
        self.drop()
        super()._load_from_state_dict(*arguments, **options)

    def _save_to_state_dict(self, *arguments: Any, **options: Any) -> None:
        self.require_weights("state_dict")
        super()._save_to_state_dict(*arguments, **options)

    def __deepcopy__(self, memo: dict) -> "FrozenCopies":
        copy = type(self)()
        copy.training = self.training
        if self._replaces_weights:
            copy._copies, copy._replaces_weights = self._copies, True
        return copy

    def __reduce__(self):
        if not self._replaces_weights:
            return (type(self), ())
        return (_replacing, (type(self), self._copies))


def copies_in(model: nn.Module) -> list[tuple[nn.Module, FrozenCopies]]:
    """Each :class:`FrozenCopies` of a model, after the module that has it."""
    return [
        (model.get_submodule(name.rpartition(".")[0]), module)
        for name, module in model.named_modules()
        if isinstance(module, FrozenCopies)
    ]


def check_dtype(dtype: str | None) -> None:
    """Raises: ValueError for a dtype of copies that there is not."""
    if dtype not in (None, INT8):
        raise ValueError(
            f'the dtype of frozen weights must be "int8" or None, got {dtype!r}: give one of them'
        )


def values_reason(weight: Tensor) -> str | None:
    """Why a weight's numbers cannot be in 8 bits, or None."""
    # Written so that NaN is not allowed either.
    if torch.stack(weight.aminmax()).abs().max() <= LARGEST_WEIGHT:
        return None
    return (
        f"a weight of shape {tuple(weight.shape)} has NaN, infinity or a number beyond {LARGEST_WEIGHT:.0e} (is the "
        "checkpoint damaged?)"
    )


def _replacing(kind: type[FrozenCopies], copies: Any) -> FrozenCopies:
    frozen = kind()
    frozen._copies, frozen._replaces_weights = copies, True
    return frozen.eval()
