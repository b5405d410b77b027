"""patch and unpatch: replace the forward of a live model by the fused forward, and restore it."""

import functools
import inspect
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from fastenc._base.extras import require
from fastenc.integrations.transformers import base_model, encoder_decoder, masked_lm, splade
from fastenc.integrations.transformers.batch_metadata import (
    KEY,
    BatchMetadata,
    read_metadata,
    take_metadata,
)
from fastenc.integrations.transformers.live_encoder import (
    FrozenOwner,
    LiveEncoder,
    architecture_of,
)
from fastenc.integrations.transformers.live_reading import Reading
from fastenc.integrations.transformers.patched_encoder import PatchedEncoder, backend_of
from fastenc.models.architectures import ARCHITECTURES
from fastenc.ops import flops  # noqa: F401  (so that a patched model's FLOPs are counted)
from fastenc.text.tokenizers import TokenizerLike

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model = TypeVar("Model", bound=nn.Module)
STATE = "_fastenc_patch"
FROZEN = "fastenc_frozen"


class _State:
    """The state of a patched module.

    Attributes:
        fused: the function that is called instead of the module's own forward.
        previous: a forward that the instance had as an attribute before it was patched, or None.
        labelled_logits_only: see :func:`patch`.
        encoder: the :class:`LiveEncoder`, if the module is an encoder.
        head: the :class:`masked_lm.LiveHead`, if the module has a masked-LM head.
        warned: the reasons for taking the own forward of which the user was warned.
    """

    def __init__(self, fused: Callable[..., Any], previous: Any):
        self.fused = fused
        self.previous = previous
        self.labelled_logits_only = False
        self.encoder: Any = None
        self.head: Any = None
        self.warned: set[str] = set()


class _CallContext(NamedTuple):
    """What a model with a head passes to its encoder, or its decoder, during one call.

    Fields:
        state: the encoder's or decoder's state.
        mask, metadata: the call's mask and its metadata, so that the encoder does not count again.
        own_forward: whether it must take its own forward.
    """

    state: _State
    mask: Tensor | None
    metadata: BatchMetadata | None
    own_forward: bool


_call_context: ContextVar[_CallContext | None] = ContextVar(
    "call of the model with a head", default=None
)


def patch(model: Model, *, labelled_logits_only: bool = False) -> Model:
    """Accelerate a Hugging Face encoder in place, and return it.

    It supports transformers' classes of the architectures in ``fastenc.models.architectures``: base models, models with
    a head (MaskedLM, SequenceClassification, TokenClassification, QuestionAnswering and others that call the base
    model), sentence-transformers models with such an encoder, and PEFT models with LoRA, in evaluation and in training.
    Of T5, mT5, umT5, BART and mBART it takes the whole model too: with labels, encoder, decoder and loss run on packed
    tokens; with a cache, as in ``generate``, the decoder takes its own forward. A SparseEncoder of
    sentence-transformers computes each text's weights without the logits of its tokens.
    Padding is removed before the embeddings. After the last layer it is restored with the value 0. Parameters,
    ``state_dict`` keys and ``save_pretrained`` do not change, and weights are read in every call.

    A call that the fused forward does not support runs the model's own forward, with a warning for each new reason:

    - attentions are requested, the mask is not (batch, length), or a row starts with padding;
    - the loss reads padding (labels on padding tokens; question answering, whose softmax is over the padded length), or
      the head does (multiple choice of RoFormer);
    - modules, constants or buffers differ from those that the class makes from its configuration, or have hooks;
    - the kernels do not support the dtype or the device;
    - the model is traced, inside a transform of ``torch.func``, or a replica of ``DataParallel``.

    Under ``torch.compile`` the own forward runs without a warning.

    On an accelerator, a forward with an attention mask waits once for the sizes of the batch, unless the collator has
    counted them (:class:`fastenc.DataCollatorWithSeqlens`).

    Args:
        model: a ``transformers.PreTrainedModel``, or a module with one (``SentenceTransformer``, ``PeftModel``).
        labelled_logits_only: for a MaskedLM or encoder-decoder called with labels: compute logits for labelled tokens
            only. The loss is the same, and ``logits`` is None. That saves most of a training step's memory and much of
            its time.
    Raises: ValueError for another architecture, or a configuration that the fused forward does not support.
    """
    top = _pretrained(model, "patch")
    if encoder_decoder.architecture_of(top) is not None:
        _patch_encoder_decoder(top, labelled_logits_only)
        return model
    architecture = architecture_of(top.base_model)
    if architecture is None:
        classes = sorted(a.class_prefix + a.bare_class for a in ARCHITECTURES.values())
        raise ValueError(
            f"patch supports {', '.join(classes)} and models over them, got {type(top).__name__} over "
            f'{type(top.base_model).__name__}: fastenc.register_attention() and attn_implementation="fastenc" give any '
            "model with attention back-ends the attention kernel"
        )
    has_head = masked_lm.is_masked_lm(top, architecture)
    if labelled_logits_only and not has_head:
        raise ValueError(
            f"labelled_logits_only is for {architecture.class_prefix}ForMaskedLM, "
            f"got {type(top).__name__}: leave it out"
        )
    encoder = _encoder_of(top)
    if STATE not in encoder.__dict__:
        live = LiveEncoder(encoder)
        _install(encoder, _encoder_forward).encoder = live
        encoder.add_module(FROZEN, live.frozen)
    if has_head:
        state = _install(top, _masked_lm_forward)
        state.labelled_logits_only = labelled_logits_only
        state.head = state.head or masked_lm.LiveHead(top, encoder.__dict__[STATE].encoder)
        splade.install(model)
    elif top is not encoder:
        _install(top, _task_forward)
    return model


def _patch_encoder_decoder(top: "PreTrainedModel", labelled_logits_only: bool) -> None:
    has_loss = type(top).__name__.endswith(encoder_decoder.HEAD)
    if labelled_logits_only and not has_loss:
        raise ValueError(
            f"labelled_logits_only is for models with a language-modelling head, got {type(top).__name__}: leave it out"
        )
    forwards = (_encoder_forward, _decoder_forward)
    stacks = encoder_decoder.stacks_of(top)
    described = [
        None if STATE in stack.__dict__ else LiveEncoder(stack, is_decoder=number == 1)
        for number, stack in enumerate(stacks)
    ]
    for stack, forward, live in zip(stacks, forwards, described, strict=True):
        if live is not None:
            _install(stack, forward).encoder = live
            stack.add_module(FROZEN, live.frozen)
    if has_loss:
        _install(top, _encoder_decoder_forward).labelled_logits_only = labelled_logits_only


def unpatch(model: Model) -> Model:
    """Restore the own forward of a patched model, and return the model. A model that is not patched is unchanged."""
    top = _pretrained(model, "unpatch")
    splade.uninstall(model)
    is_whole = encoder_decoder.architecture_of(top) is not None
    patched = (top, *(encoder_decoder.stacks_of(top) if is_whole else (_encoder_of(top),)))
    for module in {id(m): m for m in patched}.values():
        state = module.__dict__.pop(STATE, None)
        if state is None:
            continue
        module._modules.pop(FROZEN, None)
        module.__dict__.pop("_replicate_for_data_parallel", None)
        if getattr(module.__dict__.get("forward"), "func", None) is _forward:
            del module.forward
            if state.previous is not None:
                module.forward = state.previous
    return model


def encoder_of(model: nn.Module, tokenizer: TokenizerLike | None = None) -> PatchedEncoder:
    """The encoder of a patched model as an :class:`fastenc.Encoder`, which shares its weights.

    So ``encode``, ``embed_words``, packed batches and :mod:`fastenc.analysis` work on a model of transformers.

    Args:
        model: a model that :func:`fastenc.patch` has patched.
        tokenizer: transformers' fast tokenizer or a ``tokenizers.Tokenizer``; needed for calls with texts.
    Raises: ValueError for a model that is not patched.
    """
    encoder = _encoder_of(_pretrained(model, "encoder_of"))
    state = encoder.__dict__.get(STATE)
    if state is None or state.encoder is None:
        raise ValueError(
            f"encoder_of needs a patched model, got {type(model).__name__}: call fastenc.patch(model) first"
        )
    return PatchedEncoder(
        encoder, state.encoder, None if tokenizer is None else backend_of(tokenizer)
    )


def owner_of_weights(module: Any) -> Any:
    """The object with the method ``layer_weights`` for :func:`fastenc.freeze`: for a patched module a
    :class:`FrozenOwner`, else the module."""
    state = module.__dict__.get(STATE)
    if state is None or state.encoder is None:
        return module
    return FrozenOwner(module, state.encoder)


def _pretrained(model: nn.Module, caller: str) -> "PreTrainedModel":
    """The transformers model: ``model``, or the one inside it."""
    pretrained = require("transformers", extra="transformers").PreTrainedModel
    if isinstance(model, pretrained):
        return model
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, pretrained):
                return module
    raise ValueError(
        f"{caller} needs a transformers model, or a sentence-transformers model over one, "
        f"got {type(model).__name__}"
    )


def _encoder_of(top: "PreTrainedModel") -> "PreTrainedModel":
    if encoder_decoder.architecture_of(top) is not None:
        return cast("PreTrainedModel", encoder_decoder.stacks_of(top)[0])
    base = top.base_model
    architecture = architecture_of(base)
    encoder = base if architecture is None else base.get_submodule(architecture.live_path)
    return cast("PreTrainedModel", encoder)


def _install(module: "PreTrainedModel", fused: Callable[..., Any]) -> _State:
    state = module.__dict__.get(STATE)
    if state is not None:
        return state
    signature = inspect.signature(module.forward)
    module.__dict__[STATE] = state = _State(fused, module.__dict__.get("forward"))
    # A partial with the module as an argument: in a copied or unpickled model it refers to the copy.
    forward = functools.partial(_forward, module)
    # The Trainer reads the signature to know the columns that the model takes.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    module.forward = forward  # type: ignore[method-assign]
    module._replicate_for_data_parallel = functools.partial(_replica, module)  # type: ignore[method-assign]
    return state


def _replica(module: Any) -> Any:
    """What DataParallel calls on another device, instead of ``module``, whose attributes it copies."""
    replica = type(module)._replicate_for_data_parallel(module)
    replica.forward = functools.partial(_forward, replica)
    return replica


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a patched module."""
    state, class_forward = module.__dict__.get(STATE), type(module).forward
    # A partial and not a bound method: torch.compile would look a method up on the module and find this forward again.
    no_previous = state is None or state.previous is None
    plain = functools.partial(class_forward, module) if no_previous else state.previous
    if state is not None and state.encoder is not None:
        state.encoder.frozen.drop_in_call_with_gradients()
    is_replica = module.__dict__.get("_is_replica", False)
    if is_replica and state is not None:
        _warn_once(module, state, "it is a replica of DataParallel")
    if is_replica or torch.compiler.is_compiling():
        kwargs.pop(KEY, None)
        return plain(*args, **kwargs)
    names = _positional(class_forward)
    if state is None or len(args) > len(names) or not kwargs.keys().isdisjoint(names[: len(args)]):
        return plain(*args, **kwargs)  # raises Python's error for too many or repeated arguments
    return state.fused(module, state, {**dict(zip(names, args, strict=False)), **kwargs}, plain)


@functools.cache
def _positional(original) -> tuple[str, ...]:
    parameters = inspect.signature(original).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]


def _encoder_forward(encoder, state: _State, arguments: dict, plain):
    live, context = state.encoder, _context_of(state)
    if context is not None and context.own_forward:
        return plain(**arguments)
    reason, metadata, reading = base_model.inputs_reason(encoder, arguments), None, None
    if reason is None:
        if context is not None and context.mask is arguments.get("attention_mask"):
            metadata = context.metadata
        else:
            metadata = take_metadata(arguments)
        reason, reading = _read(encoder, live, arguments, metadata)
    arguments.pop(KEY, None)
    if reading is None:
        _warn_once(encoder, state, str(reason))
        return plain(**arguments)
    wanted = base_model.wanted_states(encoder, live, arguments)
    packed = base_model.run(encoder, live, reading, arguments, metadata, wanted)
    return base_model.output(encoder, live, packed, arguments, wanted)


def _context_of(state: _State) -> _CallContext | None:
    """What the model around the module of this state passes to it in the current call, or None."""
    context = _call_context.get()
    return context if context is not None and context.state is state else None


def _decoder_forward(decoder, state: _State, arguments: dict, plain):
    """A decoder without cache runs fused; with one, as in ``generate``, it takes its own forward."""
    context = _context_of(state)
    if context is not None and context.own_forward:
        return plain(**arguments)
    asked = arguments.get("use_cache")
    trains = decoder.training and torch.is_grad_enabled()
    caches = (not trains and decoder.config.use_cache) if asked is None else asked
    # Before transformers 5.24 the cache has another name.
    given = any(arguments.get(name) is not None for name in ("cache", "past_key_values"))
    if given or caches:
        return plain(**arguments)
    live = state.encoder
    reason = encoder_decoder.decoder_reason(decoder, live, arguments)
    reading = live.read(decoder)
    reason = reason or base_model.model_reason(reading)
    if reason is not None:
        _warn_once(decoder, state, reason)
        return plain(**arguments)
    return encoder_decoder.decode(decoder, live, reading, arguments)


def _encoder_decoder_forward(model, state: _State, arguments: dict, plain):
    """With labels, encoder, decoder and loss on packed tokens; else the model's own forward over the patched stacks."""
    arguments.pop(KEY, None)
    if arguments.get("labels") is None:
        return plain(**arguments)
    arguments = {**arguments, "use_cache": False}
    reason = encoder_decoder.loss_reason(model, arguments)
    reason = reason or base_model.inputs_reason(model, arguments)
    readings = []
    for stack in encoder_decoder.stacks_of(model) if reason is None else ():
        live = stack.__dict__[STATE].encoder
        reading = live.read(stack)
        reason = reason or base_model.model_reason(reading)
        readings.append((live, reading))
    mask = arguments.get("attention_mask")
    if reason is None:
        inner = {"input_ids": arguments["input_ids"], "attention_mask": mask}
        sizes = read_metadata(mask, None)
        encoder = encoder_decoder.stacks_of(model)[0]
        reason = base_model.arguments_reason(encoder, readings[0][0], inner, sizes)
    if reason is not None:
        _warn_once(model, state, reason)
        return _with_own_loss(model, arguments, plain)
    return encoder_decoder.with_loss(model, readings, arguments, state.labelled_logits_only)


def _with_own_loss(model, arguments: dict, plain):
    """The own forward of an encoder-decoder with labels, whose encoder and decoder may run fused."""
    decoder = encoder_decoder.stacks_of(model)[1]
    state = decoder.__dict__.get(STATE)
    reason = encoder_decoder.padding_labels_reason(arguments)
    if state is None or reason is None:
        return plain(**arguments)
    _warn_once(decoder, state, reason)
    return _in_context(_CallContext(state, None, None, own_forward=True), plain, arguments)


def _in_context(context: _CallContext, plain, arguments: dict):
    token = _call_context.set(context)
    try:
        return plain(**arguments)
    finally:
        _call_context.reset(token)


def _read(
    encoder: "PreTrainedModel", live: LiveEncoder, arguments: dict, metadata: BatchMetadata | None
) -> tuple[str | None, Reading | None]:
    """(None, the reading of the encoder), or (why it must take its own forward, None)."""
    reason = base_model.arguments_reason(encoder, live, arguments, metadata)
    if reason is None:
        live.architecture.follow_live(encoder, base_model.inputs_of(arguments).shape[1])
        reading = live.read(encoder)
        reason = base_model.model_reason(reading)
    return (None, reading) if reason is None else (reason, None)


def _task_forward(model, state: _State, arguments: dict, plain):
    if base_model.inputs_reason(model, arguments) is not None:
        arguments.pop(KEY, None)
        return plain(**arguments)
    metadata = take_metadata(arguments, reads_ids=_reads_last_token(model))
    return _with_own_head(model, arguments, metadata, plain)


def _with_own_head(model, arguments: dict, metadata: BatchMetadata | None, plain):
    """The model's own forward, whose encoder may run fused."""
    encoder = _encoder_of(model)
    state = encoder.__dict__.get(STATE)
    if state is None:  # the encoder was replaced by another module
        return plain(**arguments)
    mask = arguments.get("attention_mask")
    reason = _loss_reads_padding(arguments, metadata) or _head_reads_padding(
        model, arguments, metadata
    )
    if reason is not None:
        _warn_once(encoder, state, reason)
    context = _CallContext(state, mask, metadata, own_forward=reason is not None)
    return _in_context(context, plain, arguments)


def _masked_lm_forward(model, state: _State, arguments: dict, plain):
    encoder = _encoder_of(model)
    if STATE not in encoder.__dict__ or base_model.inputs_reason(model, arguments) is not None:
        arguments.pop(KEY, None)
        return plain(**arguments)
    live, metadata = encoder.__dict__[STATE].encoder, take_metadata(arguments)
    if _loss_reads_padding(arguments, metadata) is None:
        inner = {name: value for name, value in arguments.items() if name != "labels"}
        _, reading = _read(encoder, live, inner, metadata)
        reason = state.head.unsupported_reason(model) or masked_lm.call_reason(model, arguments)
        if reading is not None and reason is None:
            only_labelled = state.labelled_logits_only
            return masked_lm.forward(
                model, encoder, live, reading, arguments, metadata, only_labelled
            )
        if reason is not None:
            _warn_once(model, state, reason)
    return _with_own_head(model, arguments, metadata, plain)


def _warn_once(model: "PreTrainedModel", state: _State, reason: str) -> None:
    """Warn of a reason for taking the own forward, if the user was not warned of it before."""
    if reason not in state.warned:
        state.warned.add(reason)
        warnings.warn(
            f"fastenc: {type(model).__name__} takes its own forward, because {reason}", stacklevel=4
        )


def _loss_reads_padding(arguments: dict, metadata: BatchMetadata | None) -> str | None:
    """Why the loss needs results for padding tokens, which the fused forward does not compute, or None."""
    if metadata is None or not metadata.padding:
        return None
    if arguments.get("start_positions") is not None:
        return "the question-answering loss is a softmax over the padded length"
    return "a padding token has a label" if metadata.labelled_padding else None


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
        return f"the head reads padding (its ids are not config.pad_token_id, {padding})"
    summary = getattr(model, "sequence_summary", None)
    if summary is None or summary.summary_type == "first" or mask is None or bool(mask.all()):
        return None
    return f"the head reads padding (summary_type is {summary.summary_type})"


def _reads_last_token(model: Any) -> bool:
    """Whether the head takes the state of a row's last token, which it finds by the ids."""
    return any(each.__name__ == "GenericForSequenceClassification" for each in type(model).__mro__)
