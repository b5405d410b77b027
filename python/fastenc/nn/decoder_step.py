"""A search's next token of each target through a decoder's frozen layers, on a CPU in one op."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fastenc.nn.frozen_layers import AdaptableLayer, FrozenLayers, runs_frozen, tables
from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.layer_inputs import AttentionInputs, LayerState
from fastenc.nn.ways import cpu_inference
from fastenc.ops import decoder_layers  # noqa: F401  (defines the ops)


def decode_tokens(
    state: LayerState,
    inputs: Callable[[int], AttentionInputs],
    order: Sequence[int],
    layers: Sequence[AdaptableLayer],
    dropouts: Sequence[LayerDropout],
    frozen: FrozenLayers | None,
) -> list[Tensor] | None:
    """The state after each layer (:func:`fastenc.nn.stack.run_stack`), or None if the layers must be called.

    They must be called for a target's first token, which computes the keys and values of the source.

    Args:
        inputs: those of each layer, by its number.
        order: the module of each layer.
        layers, dropouts, frozen: as :func:`fastenc.nn.frozen_layers.frozen_stack` takes them.
    """
    x = state.x
    if frozen is None or not runs_frozen(x, layers, dropouts) or not frozen.decode_in_one_op:
        return None
    if x.dtype != torch.float32 or not cpu_inference.has_few_rows(x) or is_in_torch_dispatch_mode():
        return None
    of_layers = [inputs(number) for number in range(len(order))]
    caches = [each.cache for each in of_layers if each.cache is not None]
    sources = [cache.source for cache in caches if cache.source is not None]
    source, targets = of_layers[0].source, of_layers[0].cu_seqlens.shape[0] - 1
    if len(sources) < len(order) or source is None or x.shape[0] != targets:
        return None
    ops = torch.ops.fastenc
    states = (ops.int8_decoder_layers if frozen.in_8_bits else ops.decoder_layers)(
        *state,
        [cache.with_room(1) for cache in caches],
        caches[0].length,
        sources,
        source.cu_seqlens,
        source.max_seqlen,
        tables([each.relative_bias for each in of_layers]),
        len(order),
        *frozen.decoder_arguments(tuple(order)),
    )
    for cache in caches:
        cache.length += 1
    return states
