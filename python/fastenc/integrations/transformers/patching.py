"""patch and unpatch: the fused forward replaces a live model's forward."""

import functools
import inspect
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastenc._extras import require
from fastenc.integrations.transformers import base_model, masked_lm
from fastenc.integrations.transformers.batch_metadata import KEY, BatchMetadata, take_metadata
from fastenc.integrations.transformers.live_encoder import (
    FrozenOwner,
    LiveEncoder,
    Reading,
    architecture_of,
)
from fastenc.models.architectures import ARCHITECTURES
from fastenc.ops import _flops  # noqa: F401  (so that a patched model's FLOPs are counted)

STATE = "_fastenc_patch"
FROZEN = "fastenc_frozen"


class _State:
    """What a patched module remembers.

    Attributes:
        fused: what is called in the place of the module's own forward.
        previous: an instance's own forward that was there before.
        encoder: the :class:`LiveEncoder`, on the module that is one.
        head: the :class:`masked_lm.LiveHead`, on a module that has one.
        said: reasons for the model's own forward that were already given.
    """

    def __init__(self, fused: Callable[..., Any], previous: Any):
        self.fused = fused
        self.previous = previous
        self.labelled_logits_only = False
        self.encoder: Any = None
        self.head: Any = None
        self.said: set[str] = set()


class _Told(NamedTuple):
    """What a task model tells the encoder inside, for the length of one call.

    Fields:
        state: the encoder's.
        mask, metadata: what it need not read again.
        own_forward: whether it must take its own forward.
    """

    state: _State
    mask: Tensor | None
    metadata: BatchMetadata | None
    own_forward: bool


_told: ContextVar[_Told | None] = ContextVar("told by the task model", default=None)


def patch(model: Any, *, labelled_logits_only: bool = False) -> Any:
    """Accelerate a Hugging Face encoder in place, and return it.

    Works on transformers' classes of the architectures in ``fastenc.models.architectures``: base models, models with a
    task head (MaskedLM, SequenceClassification, TokenClassification, QuestionAnswering and any other that calls the
    base model), sentence-transformers models over them and PEFT models with LoRA; in evaluation and in training.
    Padding is removed before the embedding and put back after the last layer, where it holds 0; parameters,
    ``state_dict`` keys and ``save_pretrained`` stay as they are, and weights are read at every call.

    A call that the fused forward does not cover takes the model's own, unchanged, and says so in a warning once for
    each reason: attentions wanted, a mask that is not (batch, length), a row that starts with padding, a loss that
    reads padding (labels on padding tokens; question answering, whose softmax runs over the padded length), modules,
    constants or buffers that are not what the class and its configuration make, hooks inside the model, another dtype
    or device than the kernels have, tracing, the transforms of ``torch.func``, a replica of ``DataParallel``; without a
    warning, ``torch.compile``.

    On an accelerator a forward with an attention mask waits once for its sizes, unless the collator has noted them:
    :class:`fastenc.DataCollatorWithSeqlens`.

    Args:
        model: a ``transformers.PreTrainedModel``, or a module over one (``SentenceTransformer``, ``PeftModel``).
        labelled_logits_only: for a MaskedLM model called with labels, compute logits for labelled tokens only. The
            loss is the same, ``logits`` is None: most of a training step's memory and much of its time is saved.
    Raises: ValueError for another architecture, or a configuration that the fused forward does not compute.
    """
    top = _pretrained(model)
    kind = architecture_of(top.base_model)
    if kind is None:
        classes = sorted(a.class_prefix + a.bare_class for a in ARCHITECTURES.values())
        raise ValueError(
            f"patch supports {', '.join(classes)} and models over them, got {type(top).__name__} over "
            f'{type(top.base_model).__name__}: fastenc.register_attention() and attn_implementation="fastenc" give any '
            "model with attention back-ends the attention kernel"
        )
    has_head = masked_lm.is_masked_lm(top, kind)
    if labelled_logits_only and not has_head:
        raise ValueError(
            f"labelled_logits_only is for {kind.class_prefix}ForMaskedLM, got {type(top).__name__}"
        )
    encoder = _encoder_of(top)
    if STATE not in encoder.__dict__:
        live = LiveEncoder(encoder)
        _install(encoder, _encoder_forward).encoder = live
        encoder.add_module(FROZEN, live.frozen)
    if has_head:
        state = _install(top, _masked_lm_forward)
        state.labelled_logits_only = labelled_logits_only
        state.head = state.head or masked_lm.LiveHead(top, kind)
    elif top is not encoder:
        _install(top, _task_forward)
    return model


def unpatch(model: Any) -> Any:
    """Give a patched model its own forward back, and return it. A model that is not patched stays as it is."""
    top = _pretrained(model)
    for module in {id(m): m for m in (top, _encoder_of(top))}.values():
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


def owner_of_weights(module: Any) -> Any:
    """What :func:`fastenc.freeze` packs the layers of: a patched module's record, or the module itself."""
    state = module.__dict__.get(STATE)
    if state is None or state.encoder is None:
        return module
    return FrozenOwner(module, state.encoder)


def _pretrained(model: Any) -> Any:
    """The transformers model itself, or the one inside a model over it."""
    pretrained = require("transformers", extra="transformers").PreTrainedModel
    if isinstance(model, pretrained):
        return model
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, pretrained):
                return module
    raise ValueError(
        "patch needs a transformers model, or a sentence-transformers model over one, "
        f"got {type(model).__name__}"
    )


def _encoder_of(top: Any) -> Any:
    base = top.base_model
    kind = architecture_of(base)
    return base if kind is None else base.get_submodule(kind.live_path)


def _install(module: Any, fused: Callable[..., Any]) -> _State:
    state = module.__dict__.get(STATE)
    if state is not None:
        return state
    own = inspect.signature(module.forward)
    module.__dict__[STATE] = state = _State(fused, module.__dict__.get("forward"))
    # With its module as an argument, so that the forward of a copy, or of what was pickled, has the copy.
    forward = functools.partial(_forward, module)
    # The Trainer reads the signature to know the columns that the model takes.
    forward.__signature__ = own  # type: ignore[attr-defined]
    module.forward = forward
    module._replicate_for_data_parallel = functools.partial(_replica, module)
    return state


def _replica(module: Any) -> Any:
    """What DataParallel calls on another device, instead of ``module``, whose attributes it copies."""
    replica = type(module)._replicate_for_data_parallel(module)
    replica.forward = functools.partial(_forward, replica)
    return replica


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a patched module."""
    state, own = module.__dict__.get(STATE), type(module).forward
    # Not a bound method, whose call torch.compile would look up on the module, where it finds this forward.
    no_other = state is None or state.previous is None
    plain = functools.partial(own, module) if no_other else state.previous
    is_replica = module.__dict__.get("_is_replica", False)
    if is_replica and state is not None:
        _warn_once(module, state, "it is a replica of DataParallel")
    if is_replica or torch.compiler.is_compiling():
        kwargs.pop(KEY, None)
        return plain(*args, **kwargs)
    names = _positional(own)
    if state is None or len(args) > len(names) or not kwargs.keys().isdisjoint(names[: len(args)]):
        return plain(*args, **kwargs)  # which refuses an argument too many, or given twice
    return state.fused(module, state, {**dict(zip(names, args, strict=False)), **kwargs}, plain)


@functools.cache
def _positional(original) -> tuple[str, ...]:
    parameters = inspect.signature(original).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]


def _encoder_forward(encoder, state: _State, arguments: dict, plain):
    live, told = state.encoder, _told.get()
    told = told if told is not None and told.state is state else None
    if told is not None and told.own_forward:
        return plain(**arguments)
    reason, metadata, reading = base_model.inputs_reason(encoder, arguments), None, None
    if reason is None:
        if told is not None and told.mask is arguments.get("attention_mask"):
            metadata = told.metadata
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


def _read(
    encoder: Any, live: LiveEncoder, arguments: dict, metadata: BatchMetadata | None
) -> tuple[str | None, Reading | None]:
    """(Why the encoder must take its own forward, None), or (None, what it is made of)."""
    reason = base_model.arguments_reason(encoder, live, arguments, metadata)
    if reason is None:
        reading = live.read(encoder)
        reason = base_model.model_reason(reading)
    return (None, reading) if reason is None else (reason, None)


def _task_forward(model, state: _State, arguments: dict, plain):
    if base_model.inputs_reason(model, arguments) is not None:
        arguments.pop(KEY, None)
        return plain(**arguments)
    metadata = take_metadata(arguments)
    return _with_own_head(model, arguments, metadata, plain)


def _with_own_head(model, arguments: dict, metadata: BatchMetadata | None, plain):
    encoder = _encoder_of(model)
    state = encoder.__dict__.get(STATE)
    if state is None:  # another encoder was put in
        return plain(**arguments)
    reason = _loss_reads_padding(arguments, metadata)
    if reason is not None:
        _warn_once(encoder, state, reason)
    mask = arguments.get("attention_mask")
    token = _told.set(_Told(state, mask, metadata, own_forward=reason is not None))
    try:
        return plain(**arguments)
    finally:
        _told.reset(token)


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
            fewer = state.labelled_logits_only
            return masked_lm.forward(model, encoder, live, reading, arguments, metadata, fewer)
        if reason is not None:
            _warn_once(model, state, reason)
    return _with_own_head(model, arguments, metadata, plain)


def _warn_once(model: Any, state: _State, reason: str) -> None:
    """Say once a reason that a call takes the model's own forward."""
    if reason not in state.said:
        state.said.add(reason)
        warnings.warn(
            f"fastenc: {type(model).__name__} takes its own forward, because {reason}", stacklevel=4
        )


def _loss_reads_padding(arguments: dict, metadata: BatchMetadata | None) -> str | None:
    """Whether the task's loss depends on what the model computes at padding, which the fused forward leaves out."""
    if metadata is None or not metadata.padding:
        return None
    if arguments.get("start_positions") is not None:
        return "the question-answering loss is a softmax over the padded length"
    return "a padding token has a label" if metadata.labelled_padding else None
