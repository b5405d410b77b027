"""The forwards of patched modules: what is computed fused, and when a module takes its own forward.

Each takes the module, its state, the arguments of the call by their names, and the module's own forward.
"""

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastenc.integrations.transformers import (
    base_model,
    classification,
    encoder_decoder,
    masked_lm,
)
from fastenc.integrations.transformers.batch_metadata import (
    KEY,
    BatchMetadata,
    read_metadata,
    take_metadata,
)
from fastenc.integrations.transformers.cached_decoding import CACHE_NAMES, decode_next
from fastenc.integrations.transformers.hooks import forward_reason
from fastenc.integrations.transformers.live_encoder import LiveEncoder
from fastenc.integrations.transformers.live_reading import Reading
from fastenc.integrations.transformers.lora import is_lora_linear
from fastenc.integrations.transformers.patch_state import (
    PatchState,
    encoder_in,
    state_of,
    warn_once,
)
from fastenc.packing import first_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _CallContext(NamedTuple):
    """What a model with a head passes to its encoder, or its decoder, during one call.

    Fields:
        state: the encoder's or decoder's state.
        mask, metadata: the call's mask and its metadata, so that the encoder does not count again.
        own_forward: whether the decoder must take its own forward.
        first_only: whether of each row the model reads the first token's last state alone.
        padding_reason: why the encoder must compute padding too, or None.
    """

    state: PatchState
    mask: Tensor | None = None
    metadata: BatchMetadata | None = None
    own_forward: bool = False
    first_only: bool = False
    padding_reason: str | None = None


_call_context: ContextVar[_CallContext | None] = ContextVar(
    "call of the model with a head", default=None
)


def encoder_forward(encoder, state: PatchState, arguments: dict, plain):
    live, context = state.encoder, _context_of(state)
    keep_padding = False
    reason, metadata, reading = base_model.inputs_reason(encoder, arguments), None, None
    if reason is None:
        if context is not None and context.mask is arguments.get("attention_mask"):
            metadata = context.metadata
        else:
            metadata = take_metadata(arguments, reads_ids=True)
        reason, reading = _read(encoder, live, arguments)
        padding_reason = None if context is None else context.padding_reason
        padding_reason = padding_reason or base_model.kept_padding_reason(encoder, live, metadata)
        if padding_reason is not None and reading is not None:
            inputs = base_model.inputs_of(arguments)
            keep_padding = base_model.can_keep_padding(live, inputs, metadata)
            if not keep_padding:
                reason, reading = padding_reason, None
    arguments.pop(KEY, None)
    if reading is None:
        warn_once(encoder, state, str(reason))
        return plain(**arguments)
    wanted = base_model.wanted_states(encoder, live, arguments)
    choose = first_tokens if context is not None and context.first_only else None
    packed = base_model.run(*(live, reading, arguments, metadata, wanted, choose), keep_padding)
    return base_model.output(encoder, live, packed, arguments, wanted)


def _context_of(state: PatchState) -> _CallContext | None:
    """What the model around the module of this state passes to it in the current call, or None."""
    context = _call_context.get()
    return context if context is not None and context.state is state else None


def decoder_forward(decoder, state: PatchState, arguments: dict, plain):
    """A decoder runs fused without a cache, and with one, as in ``generate``, on a CPU."""
    context = _context_of(state)
    if context is not None and context.own_forward:
        return plain(**arguments)
    asked = arguments.get("use_cache")
    trains = decoder.training and torch.is_grad_enabled()
    caches = (not trains and decoder.config.use_cache) if asked is None else asked
    given = any(arguments.get(name) is not None for name in CACHE_NAMES)
    live = state.encoder
    if given or caches:
        output = decode_next(decoder, live, arguments)
        return plain(**arguments) if output is None else output
    reason = encoder_decoder.decoder_reason(decoder, live, arguments)
    if reason is None:
        reading = live.read(decoder)
        reason = base_model.model_reason(reading)
    if reason is not None:
        warn_once(decoder, state, reason)
        return plain(**arguments)
    return encoder_decoder.decode(decoder, live, reading, arguments)


def encoder_decoder_forward(model, state: PatchState, arguments: dict, plain):
    """With labels, encoder, decoder and loss on packed tokens; else the model's own forward over the patched stacks."""
    arguments.pop(KEY, None)
    if state.frozen is not None and is_lora_linear(model.lm_head):
        state.frozen.drop()  # it may be merged later
    if arguments.get("labels") is None:
        return plain(**arguments)
    arguments = {**arguments, "use_cache": False}
    reason = forward_reason(model) or encoder_decoder.loss_reason(model, arguments)
    reason = reason or base_model.inputs_reason(model, arguments)
    readings = []
    stacks = zip(encoder_decoder.stacks_of(model), ("input_ids", "labels"), strict=True)
    for stack, ids in stacks if reason is None else ():
        of_stack = state_of(stack)
        if of_stack is None:  # the stack was replaced by another module
            return plain(**arguments)
        reading = of_stack.encoder.read(stack)
        reason = reason or base_model.model_reason(reading)
        reason = reason or base_model.length_reason(of_stack.encoder, arguments[ids].shape[1])
        readings.append((of_stack.encoder, reading))
    mask = arguments.get("attention_mask")
    if reason is None:
        inner = {"input_ids": arguments["input_ids"], "attention_mask": mask}
        sizes = read_metadata(mask, None)
        encoder = encoder_decoder.stacks_of(model)[0]
        live = readings[0][0]
        reason = base_model.arguments_reason(encoder, live, inner)
        # The decoder reads the tokens of the source alone.
        reason = reason or base_model.kept_padding_reason(encoder, live, sizes, reads_first=False)
    if reason is not None:
        warn_once(model, state, reason)
        return _with_own_loss(model, arguments, plain)
    return encoder_decoder.with_loss(model, readings, arguments, state.labelled_logits_only)


def _with_own_loss(model, arguments: dict, plain):
    """The own forward of an encoder-decoder with labels, whose encoder and decoder may run fused."""
    decoder = encoder_decoder.stacks_of(model)[1]
    state = state_of(decoder)
    reason = encoder_decoder.padding_labels_reason(arguments)
    if state is None or reason is None:
        return plain(**arguments)
    warn_once(decoder, state, reason)
    return _in_context(_CallContext(state, own_forward=True), plain, arguments)


def _in_context(context: _CallContext, plain, arguments: dict):
    token = _call_context.set(context)
    try:
        return plain(**arguments)
    finally:
        _call_context.reset(token)


def _read(
    encoder: "PreTrainedModel", live: LiveEncoder, arguments: dict
) -> tuple[str | None, Reading | None]:
    """(None, the reading of the encoder), or (why it must take its own forward, None)."""
    reason = base_model.arguments_reason(encoder, live, arguments)
    if reason is None:
        live.architecture.follow_live(encoder, base_model.inputs_of(arguments).shape[1])
        reading = live.read(encoder)
        reason = base_model.model_reason(reading)
    return (None, reading) if reason is None else (reason, None)


def task_forward(model, state: PatchState, arguments: dict, plain):
    if base_model.inputs_reason(model, arguments) is not None:
        arguments.pop(KEY, None)
        return plain(**arguments)
    metadata = take_metadata(arguments, reads_ids=_reads_last_token(model))
    return _with_own_head(model, arguments, metadata, plain, state.head)


def _with_own_head(
    model,
    arguments: dict,
    metadata: BatchMetadata | None,
    plain,
    classifier: classification.LiveClassifier | None = None,
):
    """The model's own forward, whose encoder may run fused. classifier: a head that reads the first token alone."""
    encoder = encoder_in(model)
    state = state_of(encoder)
    if state is None:  # the encoder was replaced by another module
        return plain(**arguments)
    mask = arguments.get("attention_mask")
    reason = (
        _loss_reads_padding(arguments, metadata)
        or _next_token_loss_reads_padding(model, arguments, metadata)
        or _head_reads_padding(model, arguments, metadata)
    )
    first_only = reason is None and classification.reads_first_token(model, encoder, classifier)
    context = _CallContext(state, mask, metadata, first_only=first_only, padding_reason=reason)
    return _in_context(context, plain, arguments)


def masked_lm_forward(model, state: PatchState, arguments: dict, plain):
    encoder = encoder_in(model)
    of_encoder = state_of(encoder)
    if of_encoder is None or base_model.inputs_reason(model, arguments) is not None:
        arguments.pop(KEY, None)
        return plain(**arguments)
    live, metadata = of_encoder.encoder, take_metadata(arguments)
    if _loss_reads_padding(arguments, metadata) is None:
        inner = {name: value for name, value in arguments.items() if name != "labels"}
        _, reading = _read(encoder, live, inner)
        reason = state.head.unsupported_reason(model) or masked_lm.call_reason(model, arguments)
        keeps = base_model.kept_padding_reason(encoder, live, metadata) is not None
        if reading is not None and reason is None and not keeps:
            only_labelled = state.labelled_logits_only
            return masked_lm.forward(
                model, encoder, live, reading, arguments, metadata, only_labelled
            )
        if reason is not None:
            warn_once(model, state, reason)
    return _with_own_head(model, arguments, metadata, plain)


def _loss_reads_padding(arguments: dict, metadata: BatchMetadata | None) -> str | None:
    """Why the loss needs results for padding tokens, which the fused forward does not compute, or None."""
    if metadata is None or not metadata.padding:
        return None
    if arguments.get("start_positions") is not None:
        return "the question-answering loss is a softmax over the padded length"
    return "a padding token has a label" if metadata.labelled_padding else None


def _next_token_loss_reads_padding(
    model: Any, arguments: dict, metadata: BatchMetadata | None
) -> str | None:
    """Why the loss of a head that predicts the next token needs results for padding tokens, or None.

    It compares a token's label with the logits of the position before.
    """
    if metadata is None or arguments.get("labels") is None or not _predicts_next_token(model):
        return None
    if metadata.leading_padding or metadata.gaps:
        return "the loss reads the position before a token, which is padding"
    return None


def _head_reads_padding(model: Any, arguments: dict, metadata: BatchMetadata | None) -> str | None:
    """Why the head needs states of padding tokens, or None.

    RoFormer's head for multiple choice takes the state of the row's last token, even if that is padding. ELECTRA's does
    so if its configuration says so. The head of Qwen3 and Gemma 3 for classification takes the last token whose id is
    not the configuration's padding, and without ids the row's last.
    """
    mask = arguments.get("attention_mask")
    if _reads_last_token(model):
        if metadata is None or not metadata.padding:
            return None
        if arguments.get("input_ids") is None:
            return "the head reads padding (without input_ids)"
        padding = model.config.get_text_config().pad_token_id
        if metadata.padding_has_id(padding):
            return None
        if metadata.padding == metadata.leading_padding + metadata.gaps:
            # In a row whose tokens all have the padding's id, it takes the first position.
            return "the head reads padding (before a token)"
        return f"the head reads padding (its ids are not config.pad_token_id, {padding})"
    summary = getattr(model, "sequence_summary", None)
    if summary is None or summary.summary_type == "first" or mask is None or bool(mask.all()):
        return None
    return f"the head reads padding (summary_type is {summary.summary_type})"


def _reads_last_token(model: Any) -> bool:
    """Whether the head takes the state of a row's last token, which it finds by the ids."""
    return any(each.__name__ == "GenericForSequenceClassification" for each in type(model).__mro__)


def _predicts_next_token(model: Any) -> bool:
    """Whether the model is of a class of transformers for causal language models."""
    return any(
        each.__name__.endswith(("ForCausalLM", "LMHeadModel")) for each in type(model).__mro__
    )
