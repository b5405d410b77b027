"""The fused forward of a transformers encoder: remove the padding, run the layers, restore the padding."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fastenc.integrations.transformers.batch_metadata import BatchMetadata
from fastenc.integrations.transformers.hooks import has_global_hooks
from fastenc.integrations.transformers.live_embeddings import embed
from fastenc.integrations.transformers.live_encoder import LiveEncoder
from fastenc.integrations.transformers.live_reading import Reading
from fastenc.nn.pooling import project
from fastenc.nn.stack import run_stack
from fastenc.ops import dispatch, unpack
from fastenc.ops.derivatives import in_forward_mode
from fastenc.packing import PackedBatch, check_cu_seqlens, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
INDICES = ("input_ids", "token_type_ids", "position_ids")
GLOBAL_MASK = "global_attention_mask"  # an input of families with global attention
# Arguments that do not change the results of this forward. A Seq2SeqTrainer gives generate the labels, which gives them
# to the encoder.
HARMLESS = {"return_dict", "output_hidden_states", "use_cache", "num_items_in_batch", "labels"}
# Switches of the configuration that transformers reads in every call.
READ_AT_CALL = ("output_attentions", "is_decoder", "is_causal")


class PackedRun(NamedTuple):
    """The results of the layers in packed layout.

    Fields:
        last: (total_tokens, output_size), the encoder's output, or the rows of the chosen tokens.
        states: the embeddings' output and each layer's output, or None for a state that was not requested.
        batch: the packed batch.
        tied_weight: the word embeddings' weight for a tied decoder (:func:`fastenc.ops.tied_embedding_layer_norm`).
        output_tokens: the indices of the chosen tokens, or None for all.
    """

    last: Tensor
    states: tuple[Tensor | None, ...]
    batch: PackedBatch
    tied_weight: Tensor
    output_tokens: Tensor | None = None

    def padded(self, hidden: Tensor | None) -> Any:
        """hidden (total_tokens, ...) → (batch, length, ...) with 0 for padding tokens; None → None."""
        if hidden is None:
            return None
        assert self.batch.padded_shape is not None  # pack() sets it
        rows, length = self.batch.padded_shape
        if self.batch.total_tokens == rows * length:
            return hidden.view(rows, length, *hidden.shape[1:])
        return unpack(hidden, self.batch)


def inputs_reason(model: "PreTrainedModel", arguments: dict) -> str | None:
    """Why the model must take its own forward, judged by the types of the inputs and not by their values, or None."""
    if torch.jit.is_tracing():
        return "it is being traced"
    if torch._C._functorch.maybe_current_level() is not None:
        return "it is inside a function transform (torch.func)"
    if in_forward_mode():
        return "it is inside forward-mode differentiation"
    values = {name: arguments.get(name) for name in (*INPUTS, GLOBAL_MASK)}
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if type(value) not in (Tensor, nn.Parameter):
            return f"{name} is a {type(value).__name__}"
        if name in INDICES and value.dtype not in (torch.int32, torch.int64):
            return f"{name} is {value.dtype}"
    weight = next(model.parameters())
    if weight.is_meta and not all(value.is_meta for value in given.values()):
        return "its weights are on the meta device"
    reason = _dtype_reason(weight)
    if reason is None and (dtype := dispatch.autocast_dtype(weight.device.type)) is not None:
        reason = _dtype_reason(weight.new_empty(0, dtype=dtype))
    return reason


def _dtype_reason(x: Tensor) -> str | None:
    if dispatch.choose("attention", "auto", x) != "reference":
        return None
    return f"there is no fused attention for {x.dtype} on {x.device.type}"


def arguments_reason(model: "PreTrainedModel", live: LiveEncoder, arguments: dict) -> str | None:
    """Why a call with these arguments must take the model's own forward, or None."""
    known = {*INPUTS, *HARMLESS, *((GLOBAL_MASK,) if live.stack.has_global_attention else ())}
    extra = given_names(arguments) - known
    takes_vectors = live.architecture.takes_inputs_embeds(live.config)
    if not takes_vectors and arguments.get("inputs_embeds") is not None:
        extra.add("inputs_embeds")
    if extra:
        return f"it was called with {', '.join(sorted(extra))}"
    for name in READ_AT_CALL:
        if getattr(model.config, name, False) and arguments.get(name) is not False:
            return f"config.{name} is on"
    inputs = inputs_of(arguments)
    if inputs is None:
        return "it needs exactly one of input_ids and inputs_embeds"
    if inputs.shape[1] == 0 or inputs.shape[0] == 0:
        return "the batch is empty"
    for name in ("attention_mask", GLOBAL_MASK):
        given = arguments.get(name)
        if given is not None and (given.dim() != 2 or given.shape != inputs.shape[:2]):
            return f"{name} is not (batch, length)"
    if (reason := length_reason(live, inputs.shape[1])) is not None:
        return reason
    # transformers' BART takes and ignores them.
    ignored = not _has_parameter(type(model).forward, "position_ids")
    if arguments.get("position_ids") is not None and (live.stack.reads_distances or ignored):
        return "it was called with position_ids"
    return None


def given_names(arguments: dict) -> set[str]:
    """The names of the arguments that are neither None nor False."""
    return {name for name, value in arguments.items() if value is not None and value is not False}


def length_reason(live: LiveEncoder, length: int) -> str | None:
    """Why a padded batch of this length must take the model's own forward, or None."""
    positions = live.config.max_positions
    if length > positions and live.stack.has_bounded_angles:
        return f"rotary angles of more than {positions} tokens depend on the batch"
    if length > positions and live.architecture.grows_positions:
        return f"its position table grows for more than {positions} tokens"
    return None


def kept_padding_reason(
    model: "PreTrainedModel",
    live: LiveEncoder,
    metadata: BatchMetadata | None,
    reads_first: bool = True,
) -> str | None:
    """Why padding must be computed like a token, because its state may be read or its position counts, or None.

    Args: reads_first: whether a head may read the first position of a row, even if it is padding.
    """
    if metadata is None:
        return None
    takes_left_padding = live.architecture.takes_left_padding or not reads_first
    if metadata.leading_padding and (metadata.empty_rows or not takes_left_padding):
        # Heads and poolers read the first position of a row. Heads that look for the last token do so in an empty row.
        return "a row starts with padding"
    padding_id = model.config.get_text_config().pad_token_id
    other = metadata.other_padding_id(padding_id)
    if other is not None:
        # They may be tokens whose states are read, such as those of ColBERT's query expansion.
        return f"masked tokens have the id {other} and not config.pad_token_id, {padding_id}"
    if live.stack.reads_distances and metadata.gaps:
        return "a row has padding between tokens"
    return None


def can_keep_padding(live: LiveEncoder, inputs: Tensor, metadata: BatchMetadata | None) -> bool:
    """Whether the fused forward computes padding like tokens that nobody sees, with transformers' numbers.

    Not on a GPU, where transformers' own forward of a full batch is as fast. Not with an empty row: transformers gives
    its queries the mean of all values, and the kernels give them 0.
    """
    has_empty_rows = metadata is not None and metadata.empty_rows
    takes = live.stack.takes_key_bias and live.architecture.embeds_padding
    return inputs.device.type == "cpu" and takes and not has_empty_rows


def padding_reason(mask: Tensor | None, metadata: BatchMetadata | None) -> str | None:
    """Why a decoder cannot take a target with this mask, or None: its padding must be on the right."""
    if mask is not None and (metadata is None or metadata.gaps or metadata.leading_padding):
        return "the decoder's attention mask has padding before a token"
    return None


def model_reason(reading: Reading) -> str | None:
    """Why the model in its current state must take its own forward, or None."""
    if has_global_hooks():
        return "there are global module hooks"
    return reading.unsupported_reason or reading.weight_difference()


def run(
    live: LiveEncoder,
    reading: Reading,
    arguments: dict,
    metadata: BatchMetadata | None,
    wanted: frozenset[int] | None,
    choose: Callable[[PackedBatch], Tensor] | None = None,
    keep_padding: bool = False,
) -> PackedRun:
    """Embed and encode the real tokens.

    Args:
        wanted: numbers of the states to keep, or None.
        choose: returns the indices of the tokens whose last state is read. After its attention the last layer computes
            these only. None: all tokens, as always if the last state is wanted.
        keep_padding: encode padding too, as tokens that nobody sees.
    """
    wanted = wanted or frozenset()
    if live.config.num_layers in wanted:
        choose = None
    inputs, mask = inputs_of(arguments), arguments.get("attention_mask")
    ids = arguments.get("input_ids")
    if ids is None:
        ids = torch.zeros(inputs.shape[:2], dtype=torch.long, device=inputs.device)
    total, longest = (
        (None, None) if metadata is None else (metadata.total_tokens, metadata.max_seqlen)
    )
    key_bias = None
    if keep_padding and mask is not None:
        key_bias, mask = _hidden_keys(mask), None
    batch = pack(ids, mask, total_tokens=total, max_seqlen=longest)
    check_cu_seqlens(batch.cu_seqlens, batch.total_tokens, batch.max_seqlen)
    x, tied_weight = embed(live, reading, arguments, batch)
    dtype = _stream_dtype(x)
    modules = reading.stack_modules(live.frozen.current())
    kept: list[Tensor | None] = []
    output_tokens = None if choose is None else choose(batch)
    states = run_stack(
        x,
        batch.cu_seqlens,
        batch.max_seqlen,
        live.stack,
        modules,
        padded_length=inputs.shape[1],
        global_tokens=_global_tokens(batch, live, arguments, metadata),
        output_tokens=output_tokens,
        key_bias=key_bias,
    )
    for number, state in enumerate(states):
        # The embeddings' output has the own forward's dtype already.
        kept.append(None if number not in wanted else state.to(dtype) if number else state)
    last = state.to(dtype) if kept[-1] is None else kept[-1]
    projection = reading.modules.get("output_projection")
    if projection is not None:
        last = project(last, projection)
    return PackedRun(last, tuple(kept), batch, tied_weight, output_tokens)


def _hidden_keys(mask: Tensor) -> Tensor:
    """The bias of each key with which no token sees padding: float32 (batch * length,), 0 or minus infinity."""
    is_padding = (mask == 0).flatten()
    return torch.zeros(is_padding.shape, device=mask.device).masked_fill(is_padding, -torch.inf)


def _global_tokens(
    batch: PackedBatch, live: LiveEncoder, arguments: dict, metadata: BatchMetadata | None
) -> Tensor | None:
    """The indices of the global tokens. As in transformers, a 2 marks one, in the attention mask or in its product with
    (1 + the global mask).

    The number of those in a global mask is read back, which waits for a GPU.
    """
    mask: Any = arguments.get("attention_mask")
    global_mask: Any = arguments.get(GLOBAL_MASK)
    if not live.stack.has_global_attention or (mask is None and global_mask is None):
        return None
    merged = mask
    if global_mask is not None:
        merged = global_mask + 1 if mask is None else mask * (global_mask + 1)
    is_global = (merged == 2).reshape(-1)[batch.indices]
    if global_mask is None and metadata is not None:
        return is_global.nonzero_static(size=metadata.global_tokens).flatten()
    return is_global.nonzero().flatten()


def output(
    model: "PreTrainedModel",
    live: LiveEncoder,
    packed: PackedRun,
    arguments: dict,
    wanted: frozenset[int] | None,
):
    """The padded results in the class that the model's own forward returns, or as a tuple.

    If tokens were chosen, one in each row, the last state is (batch, 1, hidden_size).
    """
    chosen = packed.output_tokens is not None
    hidden = packed.last[:, None] if chosen else packed.padded(packed.last)
    fields: dict[str, Any] = {"last_hidden_state": hidden}
    if getattr(model, "pooler", None) is not None:
        fields["pooler_output"] = live.architecture.live_pooled(model, hidden)
    states = padded_states(packed, hidden, wanted)
    if states is not None:
        fields["hidden_states"] = states
    result = live.output_class(**fields)
    if switch(model, arguments, "return_dict") is not False:
        return result
    has_place = hasattr(live.output_class, "pooler_output") and "pooler_output" not in fields
    if has_place and _has_parameter(type(model).forward, "return_dict"):
        # MPNet keeps the pooler's place in the tuple, and its heads take the states from behind it.
        return hidden, None, *result.to_tuple()[1:]
    return result.to_tuple()


def in_form_asked_for(result: Any, model: "PreTrainedModel", arguments: dict) -> Any:
    """The output of a head as an object or as a tuple, as the call or else the configuration says."""
    given = arguments.get("return_dict")
    as_object = model.config.return_dict if given is None else given
    return result if as_object else result.to_tuple()


def nan_without_labels(loss: Tensor, labels: Tensor) -> Tensor:
    """The loss, or NaN if there is no label, as transformers' classes give. Callers may rely on the NaN."""
    return torch.where((labels != -100).any(), loss, torch.nan)


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


def wanted_states(
    model: "PreTrainedModel", live: LiveEncoder, arguments: dict
) -> frozenset[int] | None:
    """The numbers of the hidden states that the call requests, or None. Numbers beyond the last state are left out.

    A forward that has the switch as a parameter, which is MPNet's alone, takes any value as a flag.
    """
    asked, count = switch(model, arguments, "output_hidden_states"), live.config.num_layers + 1
    if not asked:
        return None
    is_flag = _has_parameter(type(model).forward, "output_hidden_states") or not _numbers_select()
    if asked is True or is_flag:
        return frozenset(range(count))
    numbers = [asked] if isinstance(asked, int) else list(asked)
    return frozenset(number % count for number in numbers if -count <= number < count)


def switch(model: "PreTrainedModel", arguments: dict, name: str) -> Any:
    """The value of a switch: the argument of the call, or the configuration's value.

    Only MPNet's forward has the switches as parameters: there None means the configuration's value. In other forwards a
    decorator handles them: there None means off.
    """
    given = arguments.get(name)
    if name not in arguments or (given is None and _has_parameter(type(model).forward, name)):
        return getattr(model.config, name, None)
    return given


@cache
def _has_parameter(forward: Callable, name: str) -> bool:
    """Whether a forward has a parameter of this name."""
    return name in inspect.signature(forward).parameters


@cache
def _numbers_select() -> bool:
    """Whether this transformers returns the hidden states of the given numbers alone, as since 5.23, or all of them."""
    from transformers.utils import output_capturing

    return hasattr(output_capturing, "selected_hidden_states")


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


def _stream_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the hidden states in the model's own forward under autocast.

    It is LayerNorm's output dtype. On a CPU autocast keeps the dtype of LayerNorm's input; on CUDA it is float32.
    """
    if x.device.type == "cuda" and dispatch.autocast_dtype("cuda") is not None:
        return torch.float32
    return x.dtype
