"""patch and unpatch: the fused forward in the place of a live model's own."""

import functools
import inspect
from types import MethodType
from typing import Any

from torch import nn

from fastenc._extras import require
from fastenc.integrations.transformers import base_model, masked_lm
from fastenc.integrations.transformers.architectures import BASE_MODELS, MASKED_LM_HEADS
from fastenc.integrations.transformers.batch_facts import BatchFacts, take_facts

STATE = "_fastenc_patch"


class _State:
    """What a patched module remembers. ``previous``: an instance's own forward that was there before."""

    def __init__(self, previous: Any, labelled_logits_only: bool = False):
        self.previous = previous
        self.labelled_logits_only = labelled_logits_only
        self.enabled = True
        self.layers = base_model.Layers()


def patch(model: Any, *, labelled_logits_only: bool = False) -> Any:
    """Accelerate a Hugging Face model of the BERT family in place, and return it.

    Works on BERT, RoBERTa, XLM-RoBERTa, DistilBERT and ELECTRA: base models, models with a task head (MaskedLM,
    SequenceClassification, TokenClassification, QuestionAnswering and any other that calls the base model), and
    sentence-transformers models over them; in evaluation and in training. Padding is removed before the embedding
    and put back after the last layer, where it holds 0; parameters, ``state_dict`` keys and ``save_pretrained``
    stay as they are.

    A call that the fused forward does not cover takes the model's own, unchanged, and says so in a warning once for
    each reason: attentions wanted, a mask that is not (batch, length), a row that starts with padding, a loss that
    reads padding (labels on padding tokens; question answering, whose softmax runs over the padded length),
    replaced or hooked layers, another dtype or device than the kernels have, tracing and ``torch.compile``.

    On an accelerator a forward with an attention mask waits once for its sizes, unless the collator has noted them:
    :class:`fastenc.DataCollatorWithFacts`.

    Args:
        model: a ``transformers.PreTrainedModel`` or a ``SentenceTransformer``.
        labelled_logits_only: for a MaskedLM model called with labels, compute logits for labelled tokens only. The
            loss is the same, ``logits`` is None: most of a training step's memory and much of its time is saved.
    Raises: ValueError for another architecture, or a decoder with cross-attention.
    """
    top = _pretrained(model)
    base = top.base_model
    name = type(base).__name__
    if name not in BASE_MODELS or not type(base).__module__.startswith("transformers."):
        raise ValueError(
            f"patch supports {', '.join(sorted(BASE_MODELS))} and models over them, got {type(top).__name__} "
            f"over {name}: leave this model as it is"
        )
    if getattr(base.config, "is_decoder", False) or getattr(
        base.config, "add_cross_attention", False
    ):
        raise ValueError(
            "patch supports bidirectional encoders, got a configuration with is_decoder or add_cross_attention: "
            "leave this model as it is"
        )
    if labelled_logits_only and type(top).__name__ not in MASKED_LM_HEADS:
        raise ValueError(
            f"labelled_logits_only is for {', '.join(sorted(MASKED_LM_HEADS))}, got {type(top).__name__}"
        )
    _install(base, _base_forward)
    if type(top).__name__ in MASKED_LM_HEADS:
        _install(top, _masked_lm_forward, labelled_logits_only)
    elif top is not base:
        _install(top, _task_forward)
    return model


def unpatch(model: Any) -> Any:
    """Give a patched model its own forward back, and return it. A model that is not patched stays as it is."""
    top = _pretrained(model)
    for module in {id(m): m for m in (top, top.base_model)}.values():
        state = module.__dict__.pop(STATE, None)
        if state is None:
            continue
        state.enabled = False
        module.__dict__.pop("_fastenc_said", None)
        if getattr(module.__dict__.get("forward"), "_fastenc", False):
            del module.forward
            if state.previous is not None:
                module.forward = state.previous
    return model


def _pretrained(model: Any) -> Any:
    """The transformers model itself, or the one inside a sentence-transformers model."""
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


def _install(module: Any, fused, labelled_logits_only: bool = False) -> None:
    state = module.__dict__.get(STATE)
    if state is not None:
        state.labelled_logits_only = labelled_logits_only
        return
    own = type(module).forward

    # The Trainer reads the signature, which functools.wraps keeps, to know the columns the model takes. The bound
    # method refers to its module, so that a deep copy's forward belongs to the copy.
    @functools.wraps(own)
    def forward(self, *args, **kwargs):
        state = self.__dict__.get(STATE)
        # Not a bound method, whose call torch.compile would look up on the module, where it finds this forward.
        no_other = state is None or state.previous is None
        plain = functools.partial(own, self) if no_other else state.previous
        if state is None or not state.enabled:
            return plain(*args, **kwargs)
        arguments = _named(own, args, kwargs)
        return fused(self, state, arguments, plain)

    forward._fastenc = True  # type: ignore[attr-defined]
    module.__dict__[STATE] = _State(module.__dict__.get("forward"), labelled_logits_only)
    module.forward = MethodType(forward, module)


@functools.cache
def _positional(own) -> tuple[str, ...]:
    parameters = inspect.signature(own).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]


def _named(own, args: tuple, kwargs: dict) -> dict:
    return {**dict(zip(_positional(own), args, strict=False)), **kwargs}


def _base_forward(base, state: _State, arguments: dict, plain):
    facts = state.layers.facts(arguments)
    reason = base_model.obstacle(base, state.layers, arguments, facts)
    if reason is not None:
        base_model.warn_once(base, reason)
        return plain(**arguments)
    keep_all = base_model.wanted(base, arguments, "output_hidden_states")
    packed = base_model.run(base, state.layers, arguments, facts, keep_all)
    return base_model.output(base, packed, arguments)


def _task_forward(model, state: _State, arguments: dict, plain):
    facts = take_facts(arguments)
    return _with_own_head(model, arguments, facts, plain)


def _with_own_head(model, arguments: dict, facts: BatchFacts | None, plain):
    base = model.base_model
    base_state = base.__dict__[STATE]
    reason = _loss_reads_padding(arguments, facts)
    if reason is None:
        with base_state.layers.noted(arguments, facts):
            return plain(**arguments)
    base_model.warn_once(base, reason)
    base_state.enabled = False
    try:
        return plain(**arguments)
    finally:
        base_state.enabled = True


def _masked_lm_forward(model, state: _State, arguments: dict, plain):
    base = model.base_model
    facts = take_facts(arguments)
    inner = {name: value for name, value in arguments.items() if name != "labels"}
    layers = base.__dict__[STATE].layers
    reason = base_model.obstacle(base, layers, inner, facts) or masked_lm.obstacle(model)
    if reason is not None or _loss_reads_padding(arguments, facts):
        return _with_own_head(model, arguments, facts, plain)
    return masked_lm.forward(model, base, layers, arguments, facts, state.labelled_logits_only)


def _loss_reads_padding(arguments: dict, facts: BatchFacts | None) -> str | None:
    """Whether the task's loss depends on what the model computes at padding, which the fused forward leaves out."""
    if facts is None or not facts.padding:
        return None
    if arguments.get("start_positions") is not None:
        return "the question-answering loss is a softmax over the padded length"
    return "a padding token has a label" if facts.labelled_padding else None
