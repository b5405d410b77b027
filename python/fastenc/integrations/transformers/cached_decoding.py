"""A decoder's call with a cache for one more token of each target, as transformers' ``generate`` makes it."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastenc.integrations.transformers import base_model
from fastenc.integrations.transformers.batch_metadata import read_metadata
from fastenc.integrations.transformers.encoder_decoder import SOURCE, run_decoder
from fastenc.integrations.transformers.live_encoder import FrozenOwner, LiveEncoder
from fastenc.integrations.transformers.live_reading import Reading
from fastenc.nn.frozen_layers import FrozenLayers
from fastenc.nn.frozen_weights import frozen_layers
from fastenc.ops.dispatch import autocast_dtype
from fastenc.packing import pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Before transformers 5.24 the cache has the second name.
CACHE_NAMES = ("cache", "past_key_values")
TAKEN = {"input_ids", "use_cache", "return_dict", *SOURCE, *CACHE_NAMES}


def decode_next(decoder: "PreTrainedModel", live: LiveEncoder, arguments: dict[str, Any]) -> Any:
    """The output with the state of each target's next token, or None if the decoder must take its own forward.

    The decoder must not change between the calls of a search.
    """
    cache = next((c for name in CACHE_NAMES if (c := arguments.get(name)) is not None), None)
    if cache is None or not _is_next_token(decoder, arguments):
        return None
    held = _held_cache(decoder, live, cache, arguments)
    if held is None or not _has_position(live, held.reading, cache.get_seq_length()):
        return None
    packed = run_decoder(
        *(live, held.reading, arguments, pack(arguments["input_ids"])),
        *(held.packed_states, held.source),
        caches=held.layers,
        frozen=held.frozen,
    )
    of_cache = next(name for name in CACHE_NAMES if hasattr(live.output_class, name))
    state = packed.padded(packed.last)
    result = live.output_class(**{"last_hidden_state": state, of_cache: cache})
    gives_class = base_model.switch(decoder, arguments, "return_dict") is not False
    return result if gives_class else result.to_tuple()


def _has_position(live: LiveEncoder, reading: Reading, number: int) -> bool:
    """Whether the table of positions, if the decoder has one, has this one."""
    return reading.modules.get("embeddings.position") is None or number < live.config.max_positions


def _held_cache(
    decoder: "PreTrainedModel", live: LiveEncoder, cache: Any, arguments: dict[str, Any]
) -> Any:
    """What fastenc holds of a search, or None if transformers goes on with it.

    The first token of a search is transformers' own. Then its keys and values are copied, and the weights are packed.
    """
    # It needs transformers, which only a decoder of transformers may take for granted.
    from fastenc.integrations.transformers import decoder_cache

    states, mask = arguments["encoder_hidden_states"], arguments.get("encoder_attention_mask")
    held = decoder_cache.held_by(cache, states, mask)
    if held is not None:
        return held
    if not decoder_cache.can_be_held(cache, live.config.num_layers, states):
        return None
    # transformers gives the targets of an empty source the mean of its values, and the kernels give them 0.
    sizes = read_metadata(mask, None)
    if sizes is not None and sizes.empty_rows:
        return None
    reading = live.read(decoder)
    if base_model.model_reason(reading) is not None:
        return None
    # Layers with LoRA run in separate ops, and for one source these are slower than transformers' own.
    if any(layer.adapted() is not None for layer in reading.layers):
        return None
    frozen = live.frozen.current() or FrozenLayers(frozen_layers(FrozenOwner(decoder, live)))
    held = decoder_cache.HeldCache(cache, states, mask, reading, frozen)
    decoder_cache.hold(cache, held)
    return held


def _is_next_token(decoder: "PreTrainedModel", arguments: dict[str, Any]) -> bool:
    """Whether the call asks for the next token's state of targets of equal lengths, and for nothing else."""
    if base_model.given_names(arguments) - TAKEN or torch.is_grad_enabled() or decoder.training:
        return False
    switches = ("output_attentions", "output_hidden_states")
    if any(base_model.switch(decoder, arguments, name) for name in switches):
        return False
    ids, (states, mask) = arguments.get("input_ids"), map(arguments.get, SOURCE)
    if type(ids) is not Tensor or type(states) is not Tensor or states.dim() != 3:
        return False
    if states.device.type != "cpu" or states.dtype != torch.float32:
        return False
    if ids.shape != (states.shape[0], 1) or not ids.shape[0] or not states.shape[1]:
        return False
    if mask is not None and (type(mask) is not Tensor or mask.shape != states.shape[:2]):
        return False
    return not autocast_dtype("cpu") and base_model.inputs_reason(decoder, arguments) is None
