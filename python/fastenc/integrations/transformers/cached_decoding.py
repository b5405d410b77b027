"""A decoder's calls with a cache, as ``generate`` of transformers makes them: the first tokens, then one at a time."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastenc.integrations.transformers import base_model
from fastenc.integrations.transformers.batch_metadata import read_metadata
from fastenc.integrations.transformers.encoder_decoder import SOURCE, run_decoder
from fastenc.integrations.transformers.live_encoder import LiveEncoder
from fastenc.integrations.transformers.live_reading import Reading
from fastenc.ops.dispatch import autocast_dtype
from fastenc.packing import pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Before transformers 5.24 the cache has the second name.
CACHE_NAMES = ("cache", "past_key_values")
TAKEN = {"input_ids", "use_cache", "return_dict", *SOURCE, *CACHE_NAMES}


def decode_next(decoder: "PreTrainedModel", live: LiveEncoder, arguments: dict[str, Any]) -> Any:
    """The output with the states of each target's next tokens, or None if the decoder must take its own forward.

    The decoder must not change between the calls of a search.
    """
    cache = next((c for name in CACHE_NAMES if (c := arguments.get(name)) is not None), None)
    if not _asks_for_tokens_alone(decoder, arguments):
        return None
    # It imports transformers, which need not be installed as long as no decoder of transformers calls.
    from fastenc.integrations.transformers import decoder_cache

    if cache is None:
        cache = decoder_cache.new_cache(decoder.config)
    ids, states = arguments["input_ids"], arguments["encoder_hidden_states"]
    mask = arguments.get("encoder_attention_mask")
    held = decoder_cache.held_by(cache, states, mask)
    begins = held is None
    if begins:
        held = _begun(decoder, live, cache, states, mask)
    elif ids.shape[1] > 1:
        return None
    tokens = cache.get_seq_length() + ids.shape[1]
    if held is None or not _has_positions(live, held.reading, tokens):
        return None
    packed = run_decoder(
        *(live, held.reading, arguments, pack(ids)),
        *(held.packed_states, held.source),
        caches=held.layers,
        # Packing pays from the second call on.
        frozen=None if begins else held.packed_weights(decoder, live),
    )
    if begins:
        decoder_cache.hold(cache, held)
    of_cache = next(name for name in CACHE_NAMES if hasattr(live.output_class, name))
    state = packed.padded(packed.last)
    result = live.output_class(**{"last_hidden_state": state, of_cache: cache})
    gives_class = base_model.switch(decoder, arguments, "return_dict") is not False
    return result if gives_class else result.to_tuple()


def _has_positions(live: LiveEncoder, reading: Reading, tokens: int) -> bool:
    """Whether the table of positions, if the decoder has one, is long enough."""
    return reading.modules.get("embeddings.position") is None or tokens <= live.config.max_positions


def _begun(
    decoder: "PreTrainedModel", live: LiveEncoder, cache: Any, states: Tensor, mask: Tensor | None
) -> Any:
    """What fastenc is to hold of a search that begins, or None if transformers decodes it."""
    from fastenc.integrations.transformers import decoder_cache

    if not decoder_cache.is_empty(cache):
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
    return decoder_cache.HeldCache(states, mask, reading, live.config.num_layers)


def _asks_for_tokens_alone(decoder: "PreTrainedModel", arguments: dict[str, Any]) -> bool:
    """Whether the call asks for the states of new tokens alone. Each target has the same number of them."""
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
    if ids.dim() != 2 or len(ids) != len(states) or not ids.numel() or not states.shape[1]:
        return False
    if mask is not None and (type(mask) is not Tensor or mask.shape != states.shape[:2]):
        return False
    return not autocast_dtype("cpu") and base_model.inputs_reason(decoder, arguments) is None
