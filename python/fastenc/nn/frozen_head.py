"""The output layer of a vocabulary, in 8 bits while its model is frozen so."""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.nn.frozen_copies import INT8, FrozenCopies, check_dtype, values_reason
from fastenc.ops import dispatch, gemm, int8_products

UNIT = 16  # the ops take a vocabulary whose size is a multiple of this


class HeadOwner(Protocol):
    """A model with an output layer."""

    def output_weight(self) -> Tensor:
        """(vocabulary, hidden_size)."""


class HeadCopy(NamedTuple):
    """The copy of one output layer's weight.

    Fields:
        packed: the weight in 8 bits.
        weight: the weight that was copied, which shares the memory of the model's. If the model has another one, the
            copy is dropped. None: the copy replaces the weight.
    """

    packed: Tensor
    weight: Tensor | None


class FrozenHead(FrozenCopies[HeadOwner, HeadCopy]):
    """The weight of one output layer in 8 bits, as :func:`fastenc.ops.int8_products.pack_int8` makes it.

    A search computes one token of a target at a time. Each token reads the whole weight, which in 8 bits has a quarter
    of the bytes. A float32 weight would be no faster packed, and is not copied.
    """

    @torch.no_grad()
    def copies_of(self, owner: HeadOwner, dtype: str | None) -> HeadCopy | None:
        check_dtype(dtype)
        if dtype != INT8:
            return None
        weight = owner.output_weight()
        if reason := values_reason(weight):
            raise ValueError(
                f"the output layer of the model cannot run in int8: {reason}: leave out dtype"
            )
        filling = weight.new_zeros(-len(weight) % UNIT, weight.shape[1])
        packed = int8_products.pack_int8(*([weight, filling] if len(filling) else [weight]))
        return HeadCopy(packed, weight.detach())

    def replace_weights(self, owner: HeadOwner) -> None:
        """Freeze in 8 bits. The float32 weight stays: the word embeddings may be the same tensor."""
        copy = self.copies_of(owner, INT8)
        assert copy is not None  # None is for another dtype
        self._copies, self._replaces_weights = copy._replace(weight=None), True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias: (rows, hidden_size) → (rows, vocabulary)."""
        copy = self.current()
        if copy is not None and copy.weight is not None and not copy.weight.is_set_to(weight):
            self.drop()  # as after resize_token_embeddings of transformers
            copy = None
        if copy is None or x.dtype != torch.float32 or dispatch.autocast_dtype(x.device.type):
            return gemm.linear(x, weight, bias)
        tokens = weight.shape[0]
        filled = tokens + -tokens % UNIT
        bias = None if bias is None else F.pad(bias, (0, filled - tokens))
        return int8_products.int8_linear(x, copy.packed, bias, filled)[:, :tokens]
