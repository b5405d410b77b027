"""Casts the weights of all layers to autocast's dtype in one call."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fastenc.nn import weight_copies
from fastenc.nn.layer_weights import CastWeights, LayerWeights, stack_biases
from fastenc.nn.ways.fused_sublayers import mode_reason
from fastenc.ops import dispatch


def cast_weights(x: Tensor, layers: Iterable[LayerWeights]) -> list[CastWeights] | None:
    """Copies of the weights that the fused sublayers multiply by, in autocast's dtype.

    One call casts all of them, because on a GPU each separate cast would be a kernel launch. A copy that the optimiser
    has written (:mod:`fastenc.nn.weight_copies`) is not made again.

    Args: x: the layers' input. layers: the weights of each layer; outside autocast they are not read.
    Returns: for each layer its copies. None outside autocast, if nothing requires a gradient, and if the weights are
        sharded or have different dtypes.
    """
    dtype = dispatch.autocast_dtype(x.device.type)
    if dtype is None or mode_reason() is not None:
        return None
    layers = list(layers)
    tensors = [tensor for weights in layers for tensor in weights.tensors()]
    if not x.requires_grad and not any(tensor.requires_grad for tensor in tensors):
        return None
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):
        return None
    if len({tensor.dtype for tensor in tensors}) > 1 or tensors[0].dtype == dtype:
        return None
    copies: list[Tensor] = []
    sources: list[Tensor] = []

    def cast(*stacked: Tensor) -> Tensor:
        kept = weight_copies.current(stacked[0], dtype) if len(stacked) == 1 else None
        if kept is not None:
            return kept
        rows = [tensor.shape[0] for tensor in stacked]
        copy = stacked[0].new_empty((sum(rows), *stacked[0].shape[1:]), dtype=dtype)
        copies.extend(copy.split(rows))
        sources.extend(stacked)
        if len(stacked) == 1:
            weight_copies.keep(stacked[0], copy)
        return copy

    with torch.no_grad():
        cast_layers = []
        for w in layers:
            bias = stack_biases(w.qkv_biases, w.qkv_weights)
            cast_layers.append(
                CastWeights(
                    cast(*w.qkv_weights),
                    None if bias is None else cast(bias),
                    cast(w.attention_out_weight),
                    cast(*w.up_weights),
                    cast(w.down_weight),
                    None
                    if (c := w.cross) is None
                    else (cast(c.query_weight), cast(*c.key_value_weights), cast(c.out_weight)),
                )
            )
        if copies:
            torch._foreach_copy_(copies, sources)
    return cast_layers
