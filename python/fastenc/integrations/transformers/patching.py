"""patch and unpatch: replace the forward of a live model by the fused forward, and restore it."""

import functools
import inspect
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from fastenc._base.extras import require
from fastenc.integrations.transformers import (
    classification,
    encoder_decoder,
    masked_lm,
    splade,
)
from fastenc.integrations.transformers.batch_metadata import KEY
from fastenc.integrations.transformers.bound_forward import BoundForward, calls
from fastenc.integrations.transformers.fused_forwards import (
    decoder_forward,
    encoder_decoder_forward,
    encoder_forward,
    masked_lm_forward,
    task_forward,
)
from fastenc.integrations.transformers.hooks import STATE
from fastenc.integrations.transformers.live_encoder import (
    FrozenOwner,
    LiveEncoder,
    architecture_of,
)
from fastenc.integrations.transformers.output_layer import (
    OutputLayerOwner,
    output_layer_forward,
    output_layer_of,
)
from fastenc.integrations.transformers.patch_state import (
    PatchState,
    encoder_in,
    state_of,
    warn_once,
)
from fastenc.integrations.transformers.patched_encoder import PatchedEncoder, backend_of
from fastenc.models.architectures import ARCHITECTURES
from fastenc.nn.frozen_copies import FrozenCopies
from fastenc.nn.frozen_head import FrozenHead
from fastenc.ops import flops  # noqa: F401  (so that a patched model's FLOPs are counted)
from fastenc.text.tokenizer_like import TokenizerLike

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model = TypeVar("Model", bound=nn.Module)
FROZEN = "fastenc_frozen"
# The module whose earlier forward is being called.
_in_previous: ContextVar[Any] = ContextVar("module in its earlier forward", default=None)


def patch(model: Model, *, labelled_logits_only: bool = False) -> Model:
    """Accelerate a Hugging Face encoder in place, and return it.

    It supports transformers' classes of the architectures in ``fastenc.models.architectures``: base models, models with
    a head (MaskedLM, SequenceClassification, TokenClassification, QuestionAnswering and others that call the base
    model), sentence-transformers models with such an encoder, and PEFT models with LoRA, in evaluation and in training.
    Of T5, BART and their kin (mT5, umT5; mBART, Marian, Pegasus, M2M100, NLLB) it takes the whole model too: with
    labels, encoder, decoder and loss run on packed tokens. In ``generate`` on a CPU in float32, the decoder runs fused,
    too; its weights must not change during a search. A SparseEncoder of sentence-transformers computes each text's
    weights without the logits of its tokens.
    Padding is removed before the embeddings. After the last layer it is restored with the value 0. Parameters,
    ``state_dict`` keys and ``save_pretrained`` do not change, and weights are read in every call.

    A call that the fused forward does not support runs the model's own forward, with a warning for each new reason:

    - attentions are requested, or the mask is not (batch, length);
    - padding counts, and the forward cannot keep it: a row starts with padding, or masked tokens at the rows' ends have
      one id that is neither ``config.pad_token_id`` nor 0 (ColBERT reads the states of such tokens), or the loss reads
      padding (labels on padding tokens; question answering, whose softmax is over the padded length), or the head does.
      On a CPU most models are fused then too and compute padding like a token that no token sees (docs/not-fused.md);
    - modules, constants or buffers differ from those that the class makes from its configuration, or have hooks;
    - a forward was replaced, in the model or in a class of transformers, or a user's function computes attention;
    - the kernels do not support the dtype or the device;
    - the model is traced, inside a transform of ``torch.func``, or a replica of ``DataParallel``.

    Under ``torch.compile`` the own forward runs without a warning.

    On an accelerator, a forward with an attention mask waits once for the sizes of the batch, unless the collator has
    counted them (:class:`fastenc.DataCollatorWithSeqlens`).

    Args:
        model: a ``transformers.PreTrainedModel``, or a module that contains one or several (``SentenceTransformer``,
            ``PeftModel``, your own class). All that ``patch`` knows are patched; a warning names each of the others.
        labelled_logits_only: for a MaskedLM or encoder-decoder called with labels: compute logits for labelled tokens
            only. The loss is the same, and ``logits`` is None. That saves most of a training step's memory and much of
            its time.
    Raises: ValueError for another architecture, or a configuration that the fused forward does not support.
    """
    models = _pretrained_models(model, "patch")
    known = [each for each in models if _is_known(each)]
    if not known:
        raise _unknown(models[0])
    for install in [_prepared(each, labelled_logits_only) for each in known]:
        install()
    for each in models:
        if each not in known:
            warnings.warn(
                f"fastenc: {type(each).__name__} in {type(model).__name__} is not patched: {_unknown(each)}",
                stacklevel=2,
            )
    splade.install(model)
    return model


def _is_known(model: "PreTrainedModel") -> bool:
    is_whole = encoder_decoder.architecture_of(model) is not None
    return is_whole or architecture_of(model.base_model) is not None


def _unknown(model: "PreTrainedModel") -> ValueError:
    classes = sorted(a.class_name("Model") for a in ARCHITECTURES.values())
    return ValueError(
        f"patch supports {', '.join(classes)} and models over them, got {type(model).__name__} over "
        f'{type(model.base_model).__name__}: fastenc.register_attention() and attn_implementation="fastenc" give any '
        "model with attention back-ends the attention kernel"
    )


def _prepared(top: "PreTrainedModel", labelled_logits_only: bool) -> Callable[[], None]:
    """Check one model of transformers, and return the function that installs its forwards."""
    if encoder_decoder.architecture_of(top) is not None:
        return _prepared_encoder_decoder(top, labelled_logits_only)
    architecture = architecture_of(top.base_model)
    assert architecture is not None  # _is_known() has seen it
    has_head = masked_lm.is_masked_lm(top, architecture)
    if labelled_logits_only and not has_head:
        raise ValueError(
            f"labelled_logits_only is for {architecture.class_prefix}ForMaskedLM, "
            f"got {type(top).__name__}: leave it out"
        )
    encoder = encoder_in(top)
    described = None if state_of(encoder) is not None else LiveEncoder(encoder)

    def install() -> None:
        if described is not None and state_of(encoder) is None:
            _install_stack(encoder, encoder_forward, described)
        live = encoder.__dict__[STATE].encoder
        if has_head:
            state = _install(top, masked_lm_forward)
            state.labelled_logits_only = labelled_logits_only
            state.head = state.head or masked_lm.LiveMaskedLMHead(top, live)
        elif top is not encoder:
            state = _install(top, task_forward)
            state.head = state.head or classification.live_head(top, live)

    return install


def _prepared_encoder_decoder(
    top: "PreTrainedModel", labelled_logits_only: bool
) -> Callable[[], None]:
    has_loss = encoder_decoder.has_loss(top)
    if labelled_logits_only and not has_loss:
        raise ValueError(
            f"labelled_logits_only is for models with a language-modelling head, got {type(top).__name__}: leave it out"
        )
    forwards = (encoder_forward, decoder_forward)
    stacks = encoder_decoder.stacks_of(top)
    described = [
        None if state_of(stack) is not None else LiveEncoder(stack, is_decoder=number == 1)
        for number, stack in enumerate(stacks)
    ]

    def install() -> None:
        for stack, forward, live in zip(stacks, forwards, described, strict=True):
            if live is not None:
                _install_stack(stack, forward, live)
        if has_loss:
            state = _install(top, encoder_decoder_forward)
            state.labelled_logits_only = labelled_logits_only
            head = output_layer_of(top)
            if head is not None:
                if state.frozen is None:
                    _keep_copies(top, FrozenHead())
                _install(head, output_layer_forward).frozen = state.frozen

    return install


def unpatch(model: Model) -> Model:
    """Restore the own forward of a patched model, and return the model. A model that is not patched is unchanged."""
    splade.uninstall(model)
    patched: list[nn.Module] = []
    for top in _pretrained_models(model, "unpatch"):
        is_whole = encoder_decoder.architecture_of(top) is not None
        patched += (top, *(encoder_decoder.stacks_of(top) if is_whole else (encoder_in(top),)))
        if is_whole and encoder_decoder.has_loss(top):
            patched += filter(None, [output_layer_of(top)])
    for module in {id(m): m for m in patched}.values():
        state = module.__dict__.pop(STATE, None)
        if state is None:
            continue
        module._modules.pop(FROZEN, None)
        module.__dict__.pop("_replicate_for_data_parallel", None)
        if calls(module.__dict__.get("forward"), _forward):
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
    Raises: ValueError for a model that is not patched, or that has several models of transformers inside.
    """
    models = _pretrained_models(model, "encoder_of")
    if len(models) > 1:
        names = ", ".join(type(each).__name__ for each in models)
        raise ValueError(
            f"encoder_of needs one model of transformers, got {type(model).__name__} with {names}: give one of them"
        )
    encoder = encoder_in(models[0])
    state = state_of(encoder)
    if state is None or state.encoder is None:
        raise ValueError(
            f"encoder_of needs a patched model, got {type(model).__name__}: call fastenc.patch(model) first"
        )
    return PatchedEncoder(
        encoder, state.encoder, None if tokenizer is None else backend_of(tokenizer)
    )


def owner_of_weights(module: Any) -> Any:
    """What gives :func:`fastenc.freeze` a module's weights: for a patched module an object that reads it, else the
    module itself."""
    state = state_of(module)
    if state is None or state.frozen is None:
        return module
    return OutputLayerOwner(module) if state.encoder is None else FrozenOwner(module, state.encoder)


def _pretrained_models(model: nn.Module, caller: str) -> list["PreTrainedModel"]:
    """The transformers models: ``model``, or those inside it, without those that are parts of others.

    A class of another library that contains models which ``patch`` knows, such as GLiClass's, stands for these.
    """
    pretrained = require("transformers", extra="transformers").PreTrainedModel
    found: list[PreTrainedModel] = []
    inside: set[nn.Module] = set()
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, pretrained) and module not in inside:
            parts = (each for each in module.modules() if isinstance(each, pretrained))
            if _is_known(module) or not any(map(_is_known, parts)):
                found.append(module)
                inside.update(module.modules())
    if not found:
        raise ValueError(
            f"{caller} needs a model of transformers, or a module that contains one, got {type(model).__name__}: give "
            "the loaded model, such as AutoModel.from_pretrained(name)"
        )
    return found


def _install(module: nn.Module, fused: Callable[..., Any]) -> PatchState:
    state = state_of(module)
    if state is not None:
        return state
    signature = _with_metadata(inspect.signature(module.forward))
    module.__dict__[STATE] = state = PatchState(fused, module.__dict__.get("forward"))
    forward = BoundForward(_forward, module)
    # The Trainer reads the signature to know the columns that the model takes, and generate to know its arguments.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    module.forward = forward  # type: ignore[method-assign]
    module._replicate_for_data_parallel = functools.partial(_replica, module)  # type: ignore[method-assign]
    return state


def _with_metadata(signature: inspect.Signature) -> inspect.Signature:
    """The signature with the argument that DataCollatorWithSeqlens adds to a batch."""
    added = inspect.Parameter(KEY, inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = [*signature.parameters.values(), added]
    return signature.replace(parameters=sorted(parameters, key=lambda each: each.kind))


def _install_stack(
    stack: "PreTrainedModel", forward: Callable[..., Any], live: LiveEncoder
) -> PatchState:
    """Install the forward of an encoder or a decoder."""
    state = _install(stack, forward)
    state.encoder = live
    _keep_copies(stack, live.frozen)
    return state


def _keep_copies(module: "PreTrainedModel", frozen: FrozenCopies) -> None:
    """Where :func:`fastenc.freeze` keeps the copies of a module's weights."""
    module.__dict__[STATE].frozen = frozen
    module.add_module(FROZEN, frozen)


def _replica(module: Any) -> Any:
    """What DataParallel calls on another device, instead of ``module``, whose attributes it copies."""
    replica = type(module)._replicate_for_data_parallel(module)
    replica.forward = BoundForward(_forward, replica)
    return replica


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a patched module."""
    state, class_forward = state_of(module), type(module).forward
    previous = None if state is None else state.previous
    if previous is not None and _in_previous.get() is module:
        kwargs.pop(KEY, None)
        return class_forward(module, *args, **kwargs)
    # A partial and not a bound method: torch.compile would look a method up on the module and find this forward again.
    plain = (
        functools.partial(class_forward, module)
        if previous is None
        else functools.partial(_call_previous, module, previous)
    )
    if state is not None and state.frozen is not None:
        state.frozen.drop_in_call_with_gradients()
    is_replica = module.__dict__.get("_is_replica", False)
    if is_replica and state is not None:
        warn_once(module, state, "it is a replica of DataParallel")
    if is_replica or torch.compiler.is_compiling():
        kwargs.pop(KEY, None)
        return plain(*args, **kwargs)
    names = _positional(class_forward)
    if state is None or len(args) > len(names) or not kwargs.keys().isdisjoint(names[: len(args)]):
        return plain(*args, **kwargs)  # raises Python's error for too many or repeated arguments
    return state.fused(module, state, {**dict(zip(names, args, strict=False)), **kwargs}, plain)


def _call_previous(module: Any, previous: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the forward that the module had before it was patched.

    That forward may wrap the one of an earlier patch, which is :func:`_forward`. Inside this call, :func:`_forward`
    runs the class's own forward.
    """
    token = _in_previous.set(module)
    try:
        return previous(*args, **kwargs)
    finally:
        _in_previous.reset(token)


@functools.cache
def _positional(original) -> tuple[str, ...]:
    parameters = inspect.signature(original).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]
