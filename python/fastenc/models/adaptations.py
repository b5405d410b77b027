"""Adding small trained modules to a frozen model, and choosing among them.

Models and encoders are known by what they have (``encoder``, ``adapted``, ``layers``), not by their class, which needs
this file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastenc.models.config import EncoderConfig
from fastenc.nn.adaptation import Bottleneck, LayerAdaptation, LowRank

# The linear layers that LoRA can be given to; a family has "qkv" or the first three, and "gate" where it has one.
LORA_TARGETS = ("query", "key", "value", "qkv", "attention_out", "gate", "up", "down")


@dataclass(frozen=True)
class Lora:
    """Low-rank additions to linear layers.

    Fields:
        rank: of each addition; alpha: an addition is scaled by alpha / rank.
        targets: of "query", "key", "value", "attention_out", "up", "down"; "qkv" where a family keeps the first three
            in one layer, "gate" where it has a gate apart. None: "query" and "value", or "qkv".
        dropout_p: of the addition's input, in training.
    Raises: ValueError naming the field, the rule and the value.
    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: Sequence[str] | None = None
    dropout_p: float = 0.0

    def __post_init__(self) -> None:
        _at_least_one("rank", self.rank)
        targets = ("query",) if self.targets is None else self.targets
        if not targets or not {*targets} <= {*LORA_TARGETS}:
            raise ValueError(f"targets must be of {list(LORA_TARGETS)}, got {list(targets)}")
        if not 0 <= self.dropout_p < 1:
            raise ValueError(f"dropout_p must be in [0, 1), got {self.dropout_p}")

    def targets_of(self, config: EncoderConfig) -> tuple[str, ...]:
        """The targets in a model of this configuration. Raises: ValueError for one that its family has not."""
        known = [t for names in config.architecture.lora_targets(config).values() for t in names]
        targets = self.targets
        if targets is None:
            targets = ("query", "value") if "query" in known else ("qkv",)
        unknown = [target for target in targets if target not in known]
        if unknown:
            raise ValueError(
                f"targets of a {config.family} model must be of {known}, got {unknown[0]!r}: its checkpoints have no "
                "such layer"
            )
        return tuple(target for target in known if target in targets)

    def layer(self, layer: Any, config: EncoderConfig) -> LayerAdaptation:
        low_rank, targets = {}, self.targets_of(config)
        for name, names in config.architecture.lora_targets(config).items():
            wanted = [target for target in names if target in targets]
            if wanted:
                linear = getattr(layer, name)
                rows = dict.fromkeys(names, linear.out_features // len(names))
                scale = self.alpha / self.rank
                low_rank[name] = LowRank(
                    linear.in_features, rows, wanted, self.rank, scale, self.dropout_p
                )
        return LayerAdaptation(low_rank=low_rank)


@dataclass(frozen=True)
class Adapters:
    """A bottleneck of ``size`` units after each attention and each feed-forward sublayer.

    Source: Houlsby et al. 2019, arXiv:1902.00751.
    """

    size: int = 64

    def __post_init__(self) -> None:
        _at_least_one("size", self.size)

    def layer(self, layer: Any, config: EncoderConfig) -> LayerAdaptation:
        width = config.hidden_size
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

    def layer(self, layer: Any, config: EncoderConfig) -> LayerAdaptation:
        return LayerAdaptation(prefix=torch.randn(self.length, 2, layer.qkv.out_features // 3))


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
Additions = nn.Parameter | list[LayerAdaptation]
METHODS: dict[str, type] = {
    "lora": Lora,
    "adapters": Adapters,
    "prefix": PrefixTuning,
    "prompt": PromptTuning,
}


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def add_adaptation(model: Any, adaptation: Adaptation, name: str = "default") -> None:
    """Freeze the encoder, pooler included, add trained modules to it and use them; the head stays trained, and so does
    a pooler that the checkpoint lacked.

    Args:
        name: tells several adaptations of one encoder apart.
    Raises: ValueError for a name that is taken, or that cannot be one, a prefix that leaves no position, or while an
        adaptation is merged.
    """
    check_new(model, adaptation, name)
    add_modules(model, adaptation, new_modules(encoder_of(model), adaptation), name)


def check_new(model: Any, adaptation: Adaptation, name: str) -> None:
    """Raises: ValueError, as :func:`add_adaptation` says."""
    encoder = encoder_of(model)
    if name in encoder.adapted.descriptions:
        raise ValueError(f"the model has an adaptation {name!r} already: give another name")
    if not name.isidentifier():
        raise ValueError(f"name must be letters, digits and underscores, got {name!r}")
    positions = model.config.max_positions
    if isinstance(adaptation, PrefixTuning) and adaptation.length >= positions:
        raise ValueError(
            f"length of a prefix must be less than the model's {positions} positions, got {adaptation.length}"
        )
    if isinstance(adaptation, Lora):
        adaptation.targets_of(model.config)
    if isinstance(adaptation, PrefixTuning):
        _check_prefix(encoder)
    _check_unmerged(encoder)


def _check_prefix(encoder: Any) -> None:
    """Raises: ValueError where a prefix, which has no positions, has no defined distance from the tokens."""
    if encoder.relative_bias_spec is not None or any(encoder.rotary):
        reason = "its attention depends on the distance of tokens"
    elif any(spec.attention.window != (-1, -1) for spec in encoder.specs):
        reason = "its attention has a window"
    elif len(encoder.layers) != len(encoder.specs):
        reason = "its layers share their weights"
    else:
        return
    raise ValueError(
        f"a prefix cannot be added to a {encoder.config.family} model, because {reason}: use lora, adapters or prompt"
    )


def new_modules(encoder: Any, adaptation: Adaptation) -> Additions:
    """What an adaptation adds to an encoder, with first values."""
    weight = encoder.embeddings.word.weight
    if isinstance(adaptation, PromptTuning):
        tokens = torch.randint(weight.shape[0], (adaptation.length,), device=weight.device)
        start = encoder.embeddings.normalised(weight[tokens])
        return nn.Parameter(start.detach().clone())
    return [
        adaptation.layer(layer, encoder.config).to(weight).train(layer.training)
        for layer in encoder.layers
    ]


def add_modules(model: Any, adaptation: Adaptation, added: Additions, name: str) -> None:
    """Freeze the encoder, add the modules to it and use them."""
    encoder = encoder_of(model)
    encoder.requires_grad_(False)
    for key, parameter in head_parameters(model).items():
        if key in model.first_weights:
            parameter.requires_grad_(True)
    if isinstance(added, nn.Parameter):
        encoder.adapted.prompts[name] = added
    else:
        for layer, module in zip(encoder.layers, added, strict=True):
            layer.adaptations[name] = module
    encoder.adapted.descriptions[name] = adaptation
    use_adaptation(model, name)


def use_adaptation(model: Any, name: str | None) -> None:
    """Compute with the adaptation of this name, which alone will be trained; None: with the encoder as it was.

    Each adaptation has its own values of the head's parameters; a new one starts from those of the one before.
    Raises: ValueError for a name that the model does not have, or while one is merged.
    """
    encoder = encoder_of(model)
    adapted = encoder.adapted
    if name is not None and name not in adapted.descriptions:
        raise ValueError(
            f"name must be one of {list(adapted.descriptions)}, got {name!r}: add it first"
        )
    _check_unmerged(encoder)
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
    for layer in encoder.layers:
        layer.adaptation = None if name is None or name not in layer.adaptations else name
        for key, added in layer.adaptations.items():
            added.requires_grad_(key == name)


def _check_unmerged(encoder: Any) -> None:
    if encoder.adapted.unmerged_weights:
        raise ValueError("an adaptation is merged into the weights: unmerge it first")


@torch.no_grad()
def merge_adaptation(model: Any) -> None:
    """Add the LoRA in use to the weights, so that inference costs what it did without; the old weights are kept.

    ``save_pretrained`` then writes an ordinary checkpoint.
    Raises: ValueError when the adaptation in use is not LoRA, or is merged already.
    """
    encoder = encoder_of(model)
    adapted = encoder.adapted
    name, used, merged = adapted.current, adapted.in_use(), bool(adapted.unmerged_weights)
    if name is None or not isinstance(used, Lora) or merged:
        found = "one that is merged already" if merged else used
        raise ValueError(
            f"only a LoRA in use can be merged into the weights, got {found}: call use_adaptation first"
        )
    encoder.frozen.drop()
    for layer in encoder.layers:
        for linear, added in layer.adaptations[name].low_rank.items():
            weight = getattr(layer, linear).weight
            adapted.unmerged_weights.append((weight, weight.clone()))
            weight.add_(added.weight().to(weight.dtype))
        layer.adaptation = None


@torch.no_grad()
def unmerge_adaptation(model: Any) -> None:
    """Put the weights back, bit for bit, and use the LoRA beside them again.

    Raises: ValueError when none is merged.
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


def encoder_of(model: Any) -> Any:
    """The encoder in a model, or the model itself."""
    return getattr(model, "encoder", model)


def added_modules(encoder: Any, name: str) -> Additions:
    """What an adaptation added to an encoder."""
    if name in encoder.adapted.prompts:
        return encoder.adapted.prompts[name]
    return [layer.adaptations[name] for layer in encoder.layers]


def head_parameters(model: Any) -> dict[str, nn.Parameter]:
    """The parameters that are not the checkpoint's encoder, by name: the head's, and of an encoder what had to be given
    first weights, a pooler."""
    bare = encoder_of(model) is model
    is_heads = lambda name: name in model.first_weights or not (bare or name.startswith("encoder."))
    return {name: p for name, p in model.named_parameters() if is_heads(name)}
