"""Adding small trained parts to a frozen model, and choosing among them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fastenc.models.encoder import Encoder, EncoderLayer
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.adaptation import Bottleneck, LayerAdaptation, LowRank

# Parts of the linear layers that LoRA can be given to: part → layer.
LORA_TARGETS = {
    "query": "qkv",
    "key": "qkv",
    "value": "qkv",
    "attention_out": "attention_out",
    "up": "up",
    "down": "down",
}


@dataclass(frozen=True)
class Lora:
    """Low-rank additions to linear layers.

    Fields:
        rank: of each addition; alpha: an addition is scaled by alpha / rank.
        targets: of "query", "key", "value", "attention_out", "up", "down".
        dropout_p: of the addition's input, in training.
    Raises: ValueError naming the field, the rule and the value.
    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: Sequence[str] = ("query", "value")
    dropout_p: float = 0.0

    def __post_init__(self) -> None:
        _at_least_one("rank", self.rank)
        unknown = [target for target in self.targets if target not in LORA_TARGETS]
        if unknown or not self.targets:
            raise ValueError(f"targets must be of {list(LORA_TARGETS)}, got {list(self.targets)}")
        if not 0 <= self.dropout_p < 1:
            raise ValueError(f"dropout_p must be in [0, 1), got {self.dropout_p}")

    def layer(self, layer: EncoderLayer) -> LayerAdaptation:
        parts = {}
        for name in dict.fromkeys(LORA_TARGETS.values()):
            own = [t for t in LORA_TARGETS if LORA_TARGETS[t] == name]
            if wanted := [part for part in own if part in self.targets]:
                linear = getattr(layer, name)
                rows = dict.fromkeys(own, linear.out_features // len(own))
                scale = self.alpha / self.rank
                parts[name] = LowRank(
                    linear.in_features, rows, wanted, self.rank, scale, self.dropout_p
                )
        return LayerAdaptation(low_rank=parts)


@dataclass(frozen=True)
class Adapters:
    """A bottleneck of ``size`` units after each attention and each feed-forward sublayer.

    Source: Houlsby et al. 2019, arXiv:1902.00751.
    """

    size: int = 64

    def __post_init__(self) -> None:
        _at_least_one("size", self.size)

    def layer(self, layer: EncoderLayer) -> LayerAdaptation:
        width = layer.down.out_features
        return LayerAdaptation(
            after_attention=Bottleneck(width, self.size),
            after_feed_forward=Bottleneck(width, self.size),
        )


@dataclass(frozen=True)
class PrefixTuning:
    """``length`` learned keys and values in every layer, on the first positions: a sequence's begin after them.

    So the longest sequence has ``length`` tokens fewer. The PEFT library computes the same; it has no prefixes for
    DistilBERT.
    Source: Li and Liang 2021, arXiv:2101.00190.
    """

    length: int = 20

    def __post_init__(self) -> None:
        _at_least_one("length", self.length)

    def layer(self, layer: EncoderLayer) -> LayerAdaptation:
        return LayerAdaptation(prefix=torch.randn(self.length, 2, layer.down.out_features))


@dataclass(frozen=True)
class PromptTuning:
    """``length`` learned vectors before every sequence, as outputs of the embeddings; heads do not see them.

    They start as the embeddings of tokens drawn at random. Source: Lester et al. 2021, arXiv:2104.08691.
    """

    length: int = 20

    def __post_init__(self) -> None:
        _at_least_one("length", self.length)


Adaptation = Lora | Adapters | PrefixTuning | PromptTuning
# What one adds: a prompt, or something to each layer.
Parts = nn.Parameter | list[LayerAdaptation]
METHODS: dict[str, type] = {
    "lora": Lora,
    "adapters": Adapters,
    "prefix": PrefixTuning,
    "prompt": PromptTuning,
}


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def add_adaptation(model: PretrainedModel, adaptation: Adaptation, name: str = "default") -> None:
    """Freeze the encoder, pooler included, add trained parts to it and use them; the head stays trained, and so does a
    pooler that the checkpoint lacked.

    Args:
        name: tells several adaptations of one encoder apart.
    Raises: ValueError for a name that is taken, or that cannot be one, a prefix that leaves no position, or while an
        adaptation is merged.
    """
    check_new(model, adaptation, name)
    add_parts(model, adaptation, new_parts(encoder_of(model), adaptation), name)


def check_new(model: PretrainedModel, adaptation: Adaptation, name: str) -> None:
    """Raises: ValueError, as :func:`add_adaptation` says."""
    encoder = encoder_of(model)
    if name in encoder.adaptations:
        raise ValueError(f"the model has an adaptation {name!r} already: give another name")
    if not name.isidentifier():
        raise ValueError(f"name must be letters, digits and underscores, got {name!r}")
    positions = model.config.max_positions
    if isinstance(adaptation, PrefixTuning) and adaptation.length >= positions:
        raise ValueError(
            f"length of a prefix must be less than the model's {positions} positions, got {adaptation.length}"
        )
    _check_unmerged(encoder)


def new_parts(encoder: Encoder, adaptation: Adaptation) -> Parts:
    """What an adaptation adds to an encoder, with first values."""
    weight = encoder.embeddings.word.weight
    if isinstance(adaptation, PromptTuning):
        tokens = torch.randint(weight.shape[0], (adaptation.length,), device=weight.device)
        start = encoder.embeddings.norm(weight[tokens])
        if encoder.embeddings.projection is not None:
            start = encoder.embeddings.projection(start)
        return nn.Parameter(start.detach().clone())
    return [
        adaptation.layer(layer).to(weight).train(layer.training) for layer in layers_of(encoder)
    ]


def add_parts(model: PretrainedModel, adaptation: Adaptation, parts: Parts, name: str) -> None:
    """Freeze the encoder, add the parts to it and use them."""
    encoder = encoder_of(model)
    encoder.requires_grad_(False)
    for key, parameter in head_parameters(model).items():
        if key in model.first_weights:
            parameter.requires_grad_(True)
    if isinstance(parts, nn.Parameter):
        encoder.prompts[name] = parts
    else:
        for layer, part in zip(layers_of(encoder), parts, strict=True):
            layer.adaptations[name] = part
    encoder.adaptations[name] = adaptation
    use_adaptation(model, name)


def use_adaptation(model: PretrainedModel, name: str | None) -> None:
    """Compute with the adaptation of this name, which alone will be trained; None: with the encoder as it was.

    Each adaptation has its own values of the head's parameters; a new one starts from those of the one before.
    Raises: ValueError for a name that the model does not have, or while one is merged.
    """
    encoder = encoder_of(model)
    if name is not None and name not in encoder.adaptations:
        raise ValueError(
            f"name must be one of {list(encoder.adaptations)}, got {name!r}: add it first"
        )
    _check_unmerged(encoder)
    head = head_parameters(model)
    encoder.heads[encoder.adaptation] = {key: p.detach().clone() for key, p in head.items()}
    if name in encoder.heads:
        for key, value in encoder.heads[name].items():
            head[key].data.copy_(value)
    encoder.adaptation = name
    used = None if name is None else encoder.adaptations[name]
    encoder.first_position = used.length if isinstance(used, PrefixTuning) else 0
    for key, parameter in encoder.prompts.items():
        parameter.requires_grad_(key == name)
    for layer in layers_of(encoder):
        layer.adaptation = None if name is None or name not in layer.adaptations else name
        for key, parts in layer.adaptations.items():
            parts.requires_grad_(key == name)


def _check_unmerged(encoder: Encoder) -> None:
    if encoder.unmerged_weights:
        raise ValueError("an adaptation is merged into the weights: unmerge it first")


@torch.no_grad()
def merge_adaptation(model: PretrainedModel) -> None:
    """Add the LoRA in use to the weights, so that inference costs what it did without; the old weights are kept.

    ``save_pretrained`` then writes an ordinary checkpoint.
    Raises: ValueError when the adaptation in use is not LoRA, or is merged already.
    """
    encoder = encoder_of(model)
    name = encoder.adaptation
    used = None if name is None else encoder.adaptations[name]
    if name is None or not isinstance(used, Lora) or encoder.unmerged_weights:
        found = "one that is merged already" if encoder.unmerged_weights else used
        raise ValueError(
            f"only a LoRA in use can be merged into the weights, got {found}: call use_adaptation first"
        )
    for layer in layers_of(encoder):
        for linear, part in parts_of(layer, name).low_rank.items():
            assert isinstance(part, LowRank)
            weight = getattr(layer, linear).weight
            encoder.unmerged_weights.append((weight, weight.clone()))
            weight.add_(part.weight().to(weight.dtype))
        layer.adaptation = None


@torch.no_grad()
def unmerge_adaptation(model: PretrainedModel) -> None:
    """Put the weights back, bit for bit, and use the LoRA beside them again.

    Raises: ValueError when none is merged.
    """
    encoder = encoder_of(model)
    if not encoder.unmerged_weights:
        raise ValueError("no adaptation is merged: there is nothing to unmerge")
    for weight, before in encoder.unmerged_weights:
        weight.copy_(before)
    encoder.unmerged_weights.clear()
    use_adaptation(model, encoder.adaptation)


def encoder_of(model: PretrainedModel) -> Encoder:
    """The encoder in a model, or the model itself."""
    encoder = model if isinstance(model, Encoder) else model.get_submodule("encoder")
    assert isinstance(encoder, Encoder)
    return encoder


def layers_of(encoder: Encoder) -> list[EncoderLayer]:
    return [layer for layer in encoder.layers if isinstance(layer, EncoderLayer)]


def parts_of(layer: EncoderLayer, name: str) -> LayerAdaptation:
    """What an adaptation added to a layer."""
    parts = layer.adaptations[name]
    assert isinstance(parts, LayerAdaptation)
    return parts


def all_parts(encoder: Encoder, name: str) -> Parts:
    """What an adaptation added to an encoder."""
    if name in encoder.prompts:
        return encoder.prompts[name]
    return [parts_of(layer, name) for layer in layers_of(encoder)]


def head_parameters(model: PretrainedModel) -> dict[str, nn.Parameter]:
    """The parameters that are not the checkpoint's encoder, by name: the head's, and of an encoder what had to be given
    first weights, a pooler."""
    bare = isinstance(model, Encoder)
    own = lambda name: name in model.first_weights or not (bare or name.startswith("encoder."))
    return {name: p for name, p in model.named_parameters() if own(name)}
