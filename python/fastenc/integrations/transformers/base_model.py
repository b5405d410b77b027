"""The fused forward of a transformers encoder: remove the padding, run the layers, restore the padding."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastenc.integrations.transformers.batch_metadata import BatchMetadata
from fastenc.integrations.transformers.hooks import has_global_hooks
from fastenc.integrations.transformers.live_embeddings import embed
from fastenc.integrations.transformers.live_encoder import LiveEncoder, LiveLayer, Reading
from fastenc.nn.cast_weights import cast_weights
from fastenc.nn.layer import start
from fastenc.nn.layer_spec import AttentionInputs, LayerState, with_rng_states
from fastenc.nn.layer_ways import run_layer
from fastenc.nn.relative_bias import layer_biases
from fastenc.nn.rotary import rotary_table
from fastenc.ops import _dispatch, unpack
from fastenc.ops._attention_blocks import attention_blocks
from fastenc.ops.attention import sequence_bounds
from fastenc.packing import PackedBatch, check_cu_seqlens, pack

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
INDICES = ("input_ids", "token_type_ids", "position_ids")
# Arguments that do not change the results of this forward.
HARMLESS = {"return_dict", "output_hidden_states", "use_cache", "num_items_in_batch"}
# Switches of the configuration that transformers reads in every call.
READ_AT_CALL = ("output_attentions", "is_decoder", "is_causal")


class PackedRun(NamedTuple):
    """The results of the layers in packed layout.

    Fields:
        last: (total_tokens, hidden_size), the last state.
        states: the embeddings' output and each layer's output, or None for a state that was not requested.
        batch: the packed batch.
        tied_weight: the word embeddings' weight for a tied decoder (:func:`fastenc.ops.tied_embedding_layer_norm`).
    """

    last: Tensor
    states: tuple[Tensor | None, ...]
    batch: PackedBatch
    tied_weight: Tensor

    def padded(self, hidden: Tensor | None) -> Any:
        """hidden (total_tokens, ...) → (batch, length, ...) with 0 for padding tokens; None → None."""
        if hidden is None:
            return None
        assert self.batch.padded_shape is not None  # pack() sets it
        rows, length = self.batch.padded_shape
        if self.batch.total_tokens == rows * length:
            return hidden.view(rows, length, *hidden.shape[1:])
        return unpack(hidden, self.batch)


def inputs_reason(model: Any, arguments: dict) -> str | None:
    """Why the model must take its own forward, judged by the types of the inputs and not by their values, or None."""
    if torch.jit.is_tracing():
        return "it is being traced"
    if torch._C._functorch.maybe_current_level() is not None:
        return "it is inside a function transform (torch.func)"
    if torch.autograd.forward_ad._current_level >= 0:
        return "it is inside forward-mode differentiation"
    for name in INPUTS:
        value = arguments.get(name)
        if value is None:
            continue
        if type(value) not in (Tensor, nn.Parameter):
            return f"{name} is a {type(value).__name__}"
        if name in INDICES and value.dtype not in (torch.int32, torch.int64):
            return f"{name} is {value.dtype}"
    weight = next(model.parameters())
    reason = _dtype_reason(weight)
    if reason is None and (dtype := _dispatch.autocast_dtype(weight.device.type)) is not None:
        reason = _dtype_reason(weight.new_empty(0, dtype=dtype))
    return reason


def _dtype_reason(x: Tensor) -> str | None:
    if _dispatch.choose("attention", "auto", x) != "reference":
        return None
    return f"there is no fused attention for {x.dtype} on {x.device.type}"


def arguments_reason(
    model: Any, live: LiveEncoder, arguments: dict, metadata: BatchMetadata | None
) -> str | None:
    """Why a call with these arguments must take the model's own forward, or None."""
    extra = {
        name
        for name, value in arguments.items()
        if name not in INPUTS and name not in HARMLESS and value is not None and value is not False
    }
    if extra:
        return f"it was called with {', '.join(sorted(extra))}"
    for name in READ_AT_CALL:
        if getattr(model.config, name, False) and arguments.get(name) is not False:
            return f"config.{name} is on"
    inputs, mask = inputs_of(arguments), arguments.get("attention_mask")
    if inputs is None:
        return "it needs exactly one of input_ids and inputs_embeds"
    if inputs.shape[1] == 0 or inputs.shape[0] == 0:
        return "the batch is empty"
    if mask is not None and (mask.dim() != 2 or mask.shape != inputs.shape[:2]):
        return "attention_mask is not (batch, length)"
    if metadata is not None and metadata.leading_padding:
        # Heads and poolers read the first token of a row. If that is padding, only the padded computation has a vector.
        return "a row starts with padding"
    positions = live.config.max_positions
    if inputs.shape[1] > positions and any(spec and spec.bounded for spec in live.rotary):
        return f"rotary angles of more than {positions} tokens depend on the batch"
    if _reads_distances(live):
        if metadata is not None and metadata.gaps:
            return "a row has padding between tokens"
        if arguments.get("position_ids") is not None:
            return "it was called with position_ids"
    return None


def model_reason(reading: Reading) -> str | None:
    """Why the model in its current state must take its own forward, or None."""
    if has_global_hooks():
        return "there are global module hooks"
    return reading.unsupported_reason or reading.weight_difference()


def run(
    model: Any,
    live: LiveEncoder,
    reading: Reading,
    arguments: dict,
    metadata: BatchMetadata | None,
    wanted: frozenset[int] | None,
) -> PackedRun:
    """Embed and encode the real tokens. ``wanted``: numbers of the states to keep, or None."""
    wanted = wanted or frozenset()
    inputs, mask = inputs_of(arguments), arguments.get("attention_mask")
    ids = arguments.get("input_ids")
    if ids is None:
        ids = torch.zeros(inputs.shape[:2], dtype=torch.long, device=inputs.device)
    total, longest = (
        (None, None) if metadata is None else (metadata.total_tokens, metadata.max_seqlen)
    )
    batch = pack(ids, mask, total_tokens=total, max_seqlen=longest)
    check_cu_seqlens(batch.cu_seqlens, batch.total_tokens, batch.max_seqlen)
    x, tied_weight = embed(live, reading, arguments, batch)
    kept: list[Tensor | None] = [x if 0 in wanted else None]
    dtype = _stream_dtype(x)
    state, attention_inputs = (
        _first_state(live, reading, x),
        _attention_inputs(live, reading, batch, x),
    )
    frozen = live.frozen.current(model)
    weights = [layer.weights() for layer in reading.layers]
    dropouts = [reading.layers[index].dropout for index in live.module_of_layer]
    dropouts = with_rng_states(dropouts, x.device)
    recomputes = torch.is_grad_enabled() and any(map(_recomputes, reading.layers))
    # With gradient checkpointing a layer casts its weights again in the backward instead of keeping the copies.
    cast = None if recomputes else cast_weights(x, weights)
    last = live.config.num_layers - 1
    for number, (index, spec) in enumerate(zip(live.module_of_layer, live.specs, strict=True)):
        layer = reading.layers[index]
        call = (state, attention_inputs(number), weights[index], spec, dropouts[number])
        options: dict[str, Any] = {
            "adaptation": layer.adaptation(),
            "frozen": None if frozen is None else frozen[index],
            "cast": None if cast is None else cast[index],
        }
        if torch.is_grad_enabled() and _recomputes(layer):
            state = checkpoint(run_layer, *call, use_reentrant=False, **options)
        else:
            state = run_layer(*call, **options)
        # A pre-norm layer's output is the residual sum. The norm after it belongs to the next layer or ends the stack.
        if number < last:
            kept.append(state.residual.to(dtype) if number + 1 in wanted else None)
    x = F.dropout(state.x, reading.final_dropout_p).to(dtype)
    return PackedRun(x, (*kept, x if last + 1 in wanted else None), batch, tied_weight)


def output(
    model: Any, live: LiveEncoder, packed: PackedRun, arguments: dict, wanted: frozenset[int] | None
):
    """The padded results in the class that the model's own forward returns, or as a tuple."""
    hidden = packed.padded(packed.last)
    fields: dict[str, Any] = {"last_hidden_state": hidden}
    if getattr(model, "pooler", None) is not None:
        fields["pooler_output"] = live.kind.live_pooled(model, hidden)
    states = padded_states(packed, hidden, wanted)
    if states is not None:
        fields["hidden_states"] = states
    result = live.output_class(**fields)
    return result.to_tuple() if switch(model, arguments, "return_dict") is False else result


def padded_states(
    packed: PackedRun, last: Tensor | None, wanted: frozenset[int] | None
) -> tuple[Tensor | None, ...] | None:
    """``hidden_states`` of an output. ``last``: the last state, if it was padded before."""
    if wanted is None:
        return None
    states = [packed.padded(state) for state in packed.states]
    if last is not None and states[-1] is not None:
        states[-1] = last
    return tuple(states)


def wanted_states(model: Any, live: LiveEncoder, arguments: dict) -> frozenset[int] | None:
    """The numbers of the hidden states that the call requests, or None. Numbers beyond the last state are left out."""
    asked, count = switch(model, arguments, "output_hidden_states"), live.config.num_layers + 1
    if not asked:
        return None
    if asked is True or _takes_flag(type(model).forward, "output_hidden_states"):
        return frozenset(range(count))
    numbers = [asked] if isinstance(asked, int) else list(asked)
    return frozenset(number % count for number in numbers if -count <= number < count)


def switch(model: Any, arguments: dict, name: str) -> Any:
    """The value of a switch: the argument of the call, or the configuration's value."""
    given = arguments.get(name)
    if name not in arguments or (given is None and _takes_flag(type(model).forward, name)):
        return getattr(model.config, name, None)
    return given


@cache
def _takes_flag(forward: Callable, name: str) -> bool:
    """Whether a forward has the switch as a parameter, as MPNet's has.

    Then None means the configuration's value, and any other value is a flag. In other forwards a decorator handles the
    switch: None means off, and for hidden states numbers select some of them.
    """
    return name in inspect.signature(forward).parameters


def inputs_of(arguments: dict) -> Any:
    """``input_ids`` or ``inputs_embeds``, or None unless exactly one of them is given.

    Raises: ValueError for a wrong number of dimensions.
    """
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        return None
    described: tuple[str, Any, str] = (
        ("input_ids", ids, "(batch, length)")
        if embeds is None
        else ("inputs_embeds", embeds, "(batch, length, width)")
    )
    name, value, shape = described
    if value.dim() != shape.count(",") + 1:
        raise ValueError(
            f"{name} must be {shape}, got shape {tuple(value.shape)}: add a batch dimension"
        )
    return value


def _reads_distances(live: LiveEncoder) -> bool:
    """Whether attention depends on the distance between tokens, which padding between them would change."""
    return (
        live.kind.relative_bias(live.config) is not None
        or any(spec is not None for spec in live.rotary)
        or any(spec.attention.window != (-1, -1) for spec in live.specs)
    )


def _recomputes(layer: LiveLayer) -> bool:
    return layer.module.training and getattr(layer.module, "gradient_checkpointing", False)


def _first_state(live: LiveEncoder, reading: Reading, x: Tensor) -> LayerState:
    norm = reading.modules.get("first_norm")
    weights = None if norm is None else (norm.weight, getattr(norm, "bias", None))
    return start(x, weights, live.specs[0].out_norm)


def _attention_inputs(
    live: LiveEncoder, reading: Reading, batch: PackedBatch, x: Tensor
) -> Callable[[int], AttentionInputs]:
    """A function from a layer's number to the inputs of its attention; tensors are computed once for all layers."""
    kind, config = live.kind, live.config
    bounds = sequence_bounds(x, batch.cu_seqlens, batch.max_seqlen)
    blocks = attention_blocks(x, batch.cu_seqlens, batch.max_seqlen)
    biases = [
        reading.modules[f"relative_biases.{i}"].weight for i in range(kind.relative_biases(config))
    ]
    bias = layer_biases(biases, kind.relative_bias(config))
    positions = max(config.max_positions, batch.max_seqlen)

    def of_layer(number: int) -> AttentionInputs:
        rotary = live.rotary[number]
        table = None if rotary is None else rotary_table(rotary, positions, batch.cu_seqlens.device)
        return AttentionInputs(
            batch.cu_seqlens, batch.max_seqlen, table, bias(number), bounds, blocks
        )

    return of_layer


def _stream_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the hidden states in the model's own forward under autocast.

    It is LayerNorm's output dtype. On a CPU autocast keeps the dtype of LayerNorm's input; on CUDA it is float32.
    """
    if x.device.type == "cuda" and _dispatch.autocast_dtype("cuda") is not None:
        return torch.float32
    return x.dtype
