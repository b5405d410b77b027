"""Linear layers for inference on a CPU, with weights in the order that the fastest matrix product reads them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastenc.ops import _library, _matmul
from fastenc.ops._matmul import linear, multiply_packed, pack_panels


def reordering(x: Tensor, weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """What reorders such a weight for such rows: our kernel's packing where that is the faster product, else oneDNN's.

    None stands for a plain product: the ops of oneDNN are private to torch, so anything unexpected means no.
    """
    # The compiler's question first: it cannot trace is_inference.
    if torch.compiler.is_compiling() or weight.device.type != "cpu" or weight.is_inference():
        return None
    if x.dtype != weight.dtype or not _library.HAS_CPP:
        return None
    if weight.dtype == torch.float32 and _matmul.ours_is_faster():
        return pack_panels
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return None
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    usable = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return torch.ops.mkldnn._reorder_linear_weight if usable else None


class PrepackedLinear:
    """x @ W.T + b, where W is the given weights one above the other (a fused q, k, v projection).

    The reordered copy is made at the first call, and again when a weight was replaced or changed. Torch's version
    counters do not tell: its fused optimisers and writes through ``.data`` leave them as they were, so a sample of
    the contents is compared at each call too. Where torch cannot reorder, the layer is computed plainly. For use
    without gradients.
    """

    def __init__(self) -> None:
        self._key: tuple = ()
        self._held: tuple = ()
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ) -> Tensor:
        """x: (tokens, in_features); a bias for each weight, or none at all."""
        reorder = reordering(x, weights[0])
        if reorder is None:
            return linear(x, _stack(weights), _fuse(biases))
        weight, bias = self.reordered(reorder, weights, biases)
        if reorder is pack_panels:
            return multiply_packed(x, weight, bias, sum(len(w) for w in weights))
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    def reordered(
        self,
        reorder: Callable[[Tensor], Tensor],
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """(the weights in the other order, their biases)."""
        key = (reorder, *_key([t for t in (*weights, *biases) if t is not None]))
        if self._weight is None or key != self._key:
            self._weight = reorder(_stack(weights).detach())
            self._bias = _fuse(biases)
            # Holding the tensors keeps another one from appearing at the same address.
            self._held, self._key = (*weights, *biases), key
        return self._weight, self._bias

    def forget(self) -> None:
        """Drop the copy."""
        self._key, self._held, self._weight, self._bias = (), (), None, None

    def __deepcopy__(self, memo) -> "PrepackedLinear":
        return PrepackedLinear()

    def __reduce__(self):
        return PrepackedLinear, ()


def _key(tensors: Sequence[Tensor]) -> tuple:
    buffers = [(t.data_ptr(), t.nbytes) for t in tensors]
    return (*buffers, *(t._version for t in tensors), _library.fingerprint(buffers))


def _fuse(tensors: Sequence[Tensor | None]) -> Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    return _stack(given) if given else None


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
