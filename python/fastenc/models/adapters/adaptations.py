"""Adds small trained modules to a frozen model, and selects one of several.

Models and encoders are recognised by their attributes (``encoder``, ``adapted``, ``layers``) and not by their classes,
because the files of these classes import this one.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from fastenc.models.adapters.adaptation_methods import (
    METHODS,
    AdaptableLayer,
    Adaptation,
    Lora,
    PrefixTuning,
    PromptTuning,
    encoder_part,
)
from fastenc.models.adapters.adaptation_state import ENCODER_PARTS
from fastenc.nn.adaptation import LayerAdaptation, LowRank

if TYPE_CHECKING:
    from fastenc.models.encoder import Encoder
    from fastenc.models.pretrained import PretrainedModel


class Additions(NamedTuple):
    """What an adaptation adds to an encoder: modules for its layers, for modules outside them, or a prompt."""

    layers: Sequence[LayerAdaptation] = ()
    parts: nn.ModuleDict | None = None
    prompt: nn.Parameter | None = None


def add_adaptation(model: "PretrainedModel", adaptation: Adaptation, name: str = "default") -> None:
    """Freeze the encoder with its pooler, add trained modules to it, and use them.

    The head remains trainable, and so does a pooler that was not in the checkpoint.

    Args:
        model: an encoder or a model with an encoder.
        name: the adaptation's name; a model can have several.
    Raises: ValueError for an encoder-decoder or its encoder, a name that exists or is not an identifier, a prefix that
        leaves no position, a method that the architecture does not support, while an adaptation is merged, and for a
        model that was loaded with ``dtype="int8"``.
    """
    check_new(model, adaptation, name)
    add_modules(model, adaptation, new_modules(encoder_of(model), adaptation), name)


def check_new(model: "PretrainedModel", adaptation: Adaptation, name: str) -> None:
    """Raise ValueError if :func:`add_adaptation` would."""
    encoder = encoder_of(model)
    if encoder.adapted.of_encoder_decoder:
        raise ValueError(
            "an adaptation is added to an encoder without a decoder, got an encoder-decoder or its encoder: train "
            "transformers' model with the PEFT library's LoRA after fastenc.patch, which keeps it fused"
        )
    encoder.frozen.require_weights("an adaptation")
    if name in encoder.adapted.descriptions:
        raise ValueError(f"the model has an adaptation {name!r} already: give another name")
    if not name.isidentifier():
        raise ValueError(f"name must be letters, digits and underscores, got {name!r}")
    positions = model.config.max_positions
    if isinstance(adaptation, PrefixTuning) and adaptation.length >= positions:
        raise ValueError(
            f"length of a prefix must be less than the model's {positions} positions, got {adaptation.length}: "
            "give a shorter prefix"
        )
    if isinstance(adaptation, Lora):
        for target in ENCODER_PARTS.keys() & {*adaptation.targets_of(encoder.config)}:
            encoder_part(encoder, target)
    if isinstance(adaptation, PrefixTuning):
        _check_prefix(encoder)
    check_unmerged(encoder)


def _check_prefix(encoder: "Encoder") -> None:
    """Raise ValueError if attention depends on distances, which are not defined between a prefix and the tokens."""
    if any(spec.attention.window != (-1, -1) for spec in encoder.stack.layers):
        reason = "its attention has a window"
    elif encoder.stack.reads_distances:
        reason = "its attention depends on the distance between tokens"
    elif len(encoder.layers) != len(encoder.stack.layers):
        reason = "its layers share their weights"
    else:
        return
    raise ValueError(
        f"a prefix cannot be added to a {encoder.config.family} model, because {reason}: use lora, adapters or prompt"
    )


def new_modules(encoder: "Encoder", adaptation: Adaptation) -> Additions:
    """The modules or the prompt that an adaptation adds to an encoder, initialised."""
    weight = encoder.embeddings.word.weight
    if isinstance(adaptation, PromptTuning):
        tokens = torch.randint(weight.shape[0], (adaptation.length,), device=weight.device)
        start = encoder.embeddings.normalised(weight[tokens])
        return Additions(prompt=nn.Parameter(start.detach().clone()))
    layers = [
        adaptation.layer(layer, f"layers.{i}", encoder.config).to(weight).train(layer.training)
        for i, layer in enumerate(_layers(encoder))
    ]
    parts = adaptation.parts(encoder) if isinstance(adaptation, Lora) else None
    return Additions(layers, None if parts is None else parts.to(weight).train(encoder.training))


def add_modules(
    model: "PretrainedModel", adaptation: Adaptation, added: Additions, name: str
) -> None:
    """Freeze the encoder, add the given modules or prompt to it, and use them."""
    encoder = encoder_of(model)
    encoder.requires_grad_(False)
    for key, parameter in head_parameters(model).items():
        if key in model.first_weights:
            parameter.requires_grad_(True)
    if added.prompt is not None:
        encoder.adapted.prompts[name] = added.prompt
    if added.parts is not None:
        encoder.adapted.parts[name] = added.parts
    if added.layers:
        for layer, module in zip(_layers(encoder), added.layers, strict=True):
            layer.adaptations[name] = module
    encoder.adapted.descriptions[name] = adaptation
    use_adaptation(model, name)


def use_adaptation(model: "PretrainedModel", name: str | None) -> None:
    """Use the adaptation of this name; only it can then be trained. None: use the encoder without adaptation.

    Each adaptation has separate values of the head's parameters. Those of a new adaptation are copied from the one that
    was in use before.
    Raises: ValueError for a name that the model does not have, or while an adaptation is merged.
    """
    encoder = encoder_of(model)
    adapted = encoder.adapted
    if name is not None and name not in adapted.descriptions:
        raise ValueError(
            f"name must be one of {list(adapted.descriptions)}, got {name!r}: add it first"
        )
    check_unmerged(encoder)
    head = head_parameters(model)
    adapted.heads[adapted.current] = {key: p.detach().clone() for key, p in head.items()}
    if name in adapted.heads:
        for key, value in adapted.heads[name].items():
            head[key].data.copy_(value)
    adapted.current = name
    used = adapted.in_use()
    adapted.first_position = used.length if isinstance(used, PrefixTuning) else 0
    for key, parameter in adapted.prompts.items():
        parameter.requires_grad_(key == name)
    for key, parts in adapted.parts.items():
        parts.requires_grad_(key == name)
    for layer in _layers(encoder):
        layer.adaptation = None if name is None or name not in layer.adaptations else name
        for key, added in layer.adaptations.items():
            added.requires_grad_(key == name)


def check_unmerged(encoder: "Encoder") -> None:
    """Raise ValueError if a LoRA is merged into the weights."""
    if encoder.adapted.unmerged_weights:
        raise ValueError(
            "the encoder's weights must be without a LoRA, got one that is merged into them: call "
            "fastenc.adapt.unmerge_adaptation first"
        )


@torch.no_grad()
def merge_adaptation(model: "PretrainedModel") -> None:
    """Add the LoRA in use to the weights, so that inference does not compute it separately.

    Copies of the weights are kept for :func:`unmerge_adaptation`. ``save_pretrained`` writes an ordinary checkpoint of
    a merged model.
    Raises: ValueError when the adaptation in use is not LoRA, is merged already, or is on word embeddings whose weights
        are tied to the decoder's. The decoder reads them without the LoRA.
    """
    encoder = encoder_of(model)
    adapted = encoder.adapted
    name, used, merged = adapted.current, adapted.in_use(), bool(adapted.unmerged_weights)
    if name is None or not isinstance(used, Lora) or merged:
        remedy = "call unmerge_adaptation first" if merged else "call use_adaptation first"
        given = "one that is merged already" if merged else used
        raise ValueError(
            f"only a LoRA in use can be merged into the weights, got {given}: {remedy}"
        )
    parts = adapted.parts_in_use()
    # The decoder of a masked-LM head is None if its weights are tied.
    has_tied_decoder = getattr(getattr(model, "head", None), "decoder", model) is None
    if "word" in parts and has_tied_decoder:
        raise ValueError(
            "a LoRA of 'word' cannot be merged into a masked LM whose output layer has the word embeddings' weights, "
            "because the logits would change, got one: use it unmerged, or train a LoRA without 'word'"
        )
    encoder.frozen.drop()
    of_weights: list[tuple[tuple[Tensor, ...], nn.Module]] = [
        ((encoder_part(encoder, target).weight,), added) for target, added in parts.items()
    ]
    for layer in _layers(encoder):
        for linear, added in _added_to(layer, name).low_rank.items():
            of_weights.append((layer.weights().of_linear(linear), added))
        layer.adaptation = None
    for weights, added in of_weights:
        deltas = cast(LowRank, added).weight().split([weight.shape[0] for weight in weights])
        for weight, delta in zip(weights, deltas, strict=True):
            adapted.unmerged_weights.append((weight, weight.clone()))
            weight.add_(delta.to(weight.dtype))


@torch.no_grad()
def unmerge_adaptation(model: "PretrainedModel") -> None:
    """Restore the weights exactly as they were before :func:`merge_adaptation`, and use the LoRA separately again.

    Raises: ValueError when no adaptation is merged.
    """
    encoder = encoder_of(model)
    adapted = encoder.adapted
    if not adapted.unmerged_weights:
        raise ValueError("no adaptation is merged: there is nothing to unmerge")
    encoder.frozen.drop()
    for weight, before in adapted.unmerged_weights:
        weight.copy_(before)
    adapted.unmerged_weights.clear()
    use_adaptation(model, adapted.current)


def encoder_of(model: "PretrainedModel") -> "Encoder":
    """The encoder of a model, or the model itself if it is an encoder."""
    return cast("Encoder", getattr(model, "encoder", model))


def method_in_use(model: "PretrainedModel") -> str | None:
    """The name in METHODS of the adaptation that the model's encoder uses; None: it uses none."""
    used = encoder_of(model).adapted.in_use()
    return next((name for name, method in METHODS.items() if type(used) is method), None)


def name_of_task(task: str) -> str:
    """The name of the adaptation for a checkpoint's task ("retrieval.query"): letters, digits and underscores."""
    return re.sub(r"\W", "_", task)


def added_modules(encoder: "Encoder", name: str) -> Additions:
    """The modules or the prompt that an adaptation added to an encoder."""
    adapted = encoder.adapted
    if name in adapted.prompts:
        return Additions(prompt=adapted.prompts[name])
    parts = cast(nn.ModuleDict, adapted.parts[name]) if name in adapted.parts else None
    return Additions([_added_to(layer, name) for layer in _layers(encoder)], parts)


def _layers(encoder: "Encoder") -> list[AdaptableLayer]:
    return cast(list[AdaptableLayer], [*encoder.layers])


def _added_to(layer: AdaptableLayer, name: str) -> LayerAdaptation:
    return cast(LayerAdaptation, layer.adaptations[name])


def head_parameters(model: "PretrainedModel") -> dict[str, nn.Parameter]:
    """Name → parameter of all that is not the checkpoint's encoder: the head, and parameters that the checkpoint did
    not have and that were initialised, such as a pooler."""
    bare = encoder_of(model) is model
    is_heads = lambda name: name in model.first_weights or not (bare or name.startswith("encoder."))
    return {name: p for name, p in model.named_parameters() if is_heads(name)}
