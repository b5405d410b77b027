"""Linear layers for inference on a CPU, with weights in the order that oneDNN's matrix product reads them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastenc.ops import _library
from fastenc.ops._matmul import linear, ours_is_faster

MOST_ROW_NUMBERS = 64


def can_prepack(weight: Tensor) -> bool:
    """Whether this build of torch has oneDNN's prepacked linear for such a weight.

    The ops behind it are private to torch, so anything unexpected means no.
    """
    # The compiler's question first: it cannot trace is_inference.
    if torch.compiler.is_compiling() or weight.device.type != "cpu" or weight.is_inference():
        return False
    if (
        not _library.HAS_CPP
        or not torch.backends.mkldnn.is_available()
        or not torch.backends.mkldnn.enabled
    ):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


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
        self._rows: set[int] = set()

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ) -> Tensor:
        """x: (tokens, in_features); a bias for each weight, or none at all."""
        if not can_prepack(weights[0]) or x.dtype != weights[0].dtype or not self._room_for(x):
            return linear(x, _stack(weights), _fuse(biases))
        key = _key([t for t in (*weights, *biases) if t is not None])
        if key != self._key:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(_stack(weights).detach())
            self._bias = _fuse(biases)
            # Holding the tensors keeps another one from appearing at the same address.
            self._held, self._key = (*weights, *biases), key
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def _room_for(self, x: Tensor) -> bool:
        """oneDNN compiles code for each number of rows and keeps it between the heap's large blocks, which cannot be
        joined any more: 400 numbers cost a MiniLM 0.8 GB. Where our own product is nearly as fast, it takes the rest.
        """
        if x.dtype != torch.float32 or not ours_is_faster() or x.shape[0] in self._rows:
            return True
        if len(self._rows) == MOST_ROW_NUMBERS:
            return False
        self._rows.add(x.shape[0])
        return True

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
