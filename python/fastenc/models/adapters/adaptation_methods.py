"""The methods of adaptation: what each adds to an encoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from fastenc.models.adapters.adaptation_state import ENCODER_PARTS
from fastenc.models.config import EncoderConfig
from fastenc.nn.adaptation import Bottleneck, LayerAdaptation, LowRank, LowRankRows
from fastenc.nn.layer_weights import LayerWeights

if TYPE_CHECKING:
    from fastenc.models.encoder import Encoder

# What LoRA can be added to: the linear layers, and modules outside the layers. A family has either "qkv" or the first
# three; "gate" only if it is gated.
LORA_TARGETS = (
    *("query", "key", "value", "qkv", "attention_out", "gate", "up", "down"),
    *ENCODER_PARTS,
)


class AdaptableLayer(Protocol):
    """The module of a layer, of an encoder or of a patched model, to which adaptations are added."""

    training: bool
    adaptation: str | None
    adaptations: nn.ModuleDict

    def weights(self) -> LayerWeights: ...


@dataclass(frozen=True)
class Lora:
    """Low-rank additions to linear layers (LoRA).

    Fields:
        rank: rank of each addition.
        alpha: an addition is scaled by alpha / rank.
        targets: the linear layers, of "query", "key", "value", "attention_out", "up", "down"; "qkv" for a family that
            keeps the first three in one layer; "gate" for one that has a separate gate. Also "word" and "token_type",
            the embeddings' tables (a tied decoder reads the table without the addition), and "pooler". None: "query"
            and "value", or "qkv".
        dropout_p: probability of dropout on the addition's input, in training.
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
        """The targets for a model of this configuration. Raises: ValueError for one that its family does not have."""
        known = [t for names in config.architecture.lora_targets(config).values() for t in names]
        known += encoder_parts(config)
        targets = self.targets
        if targets is None:
            targets = ("query", "value") if "query" in known else ("qkv",)
        unknown = [target for target in targets if target not in known]
        if unknown:
            raise ValueError(
                f"targets of a {config.family} model must be of {known}, got {unknown[0]!r}: leave it out, its "
                "checkpoints have no such layer"
            )
        return tuple(target for target in known if target in targets)

    def layer(self, layer: AdaptableLayer, path: str, config: EncoderConfig) -> LayerAdaptation:
        low_rank, targets = {}, self.targets_of(config)
        for name, names in config.architecture.lora_targets(config).items():
            wanted = [target for target in names if target in targets]
            if wanted:
                weights = layer.weights().of_linear(name)
                out_features = sum(weight.shape[0] for weight in weights)
                each = config.architecture.stacked_rows(
                    config, f"{path}.{name}", out_features, len(names)
                )
                rows = dict(zip(names, each, strict=True))
                scale = self.alpha / self.rank
                low_rank[name] = LowRank(
                    weights[0].shape[1], rows, wanted, self.rank, scale, self.dropout_p
                )
        return LayerAdaptation(low_rank=low_rank)

    def parts(self, encoder: "Encoder") -> nn.ModuleDict | None:
        """The additions outside the layers, or None."""
        added, scale = nn.ModuleDict(), self.alpha / self.rank
        for name in ENCODER_PARTS.keys() & {*self.targets_of(encoder.config)}:
            rows, width = encoder_part(encoder, name).weight.shape
            if name == "pooler":
                low_rank = {name: rows}
                added[name] = LowRank(width, low_rank, (name,), self.rank, scale, self.dropout_p)
            else:
                added[name] = LowRankRows(rows, width, self.rank, scale)
        return added or None


@dataclass(frozen=True)
class Adapters:
    """A bottleneck of ``size`` units after each attention and each feed-forward sublayer.

    Source: Houlsby et al. 2019, arXiv:1902.00751.
    """

    size: int = 64

    def __post_init__(self) -> None:
        _at_least_one("size", self.size)

    def layer(self, layer: AdaptableLayer, path: str, config: EncoderConfig) -> LayerAdaptation:
        width = config.hidden_size
        return LayerAdaptation(
            after_attention=Bottleneck(width, self.size),
            after_feed_forward=Bottleneck(width, self.size),
        )


@dataclass(frozen=True)
class PrefixTuning:
    """``length`` learned keys and values in every layer, which every token also attends to.

    They take the first ``length`` positions. So the position ids of a sequence start at ``length``, and the longest
    sequence has ``length`` tokens fewer. The PEFT library computes the same; it has no prefixes for DistilBERT.
    Source: Li and Liang 2021, arXiv:2101.00190.
    """

    length: int = 20

    def __post_init__(self) -> None:
        _at_least_one("length", self.length)

    def layer(self, layer: AdaptableLayer, path: str, config: EncoderConfig) -> LayerAdaptation:
        rows = sum(weight.shape[0] for weight in layer.weights().qkv_weights)
        return LayerAdaptation(prefix=torch.randn(self.length, 2, rows // 3))


@dataclass(frozen=True)
class PromptTuning:
    """``length`` learned vectors that are prepended to every sequence after the embeddings; heads do not see them.

    They are initialised with the embeddings of random tokens. Source: Lester et al. 2021, arXiv:2104.08691.
    """

    length: int = 20

    def __post_init__(self) -> None:
        _at_least_one("length", self.length)


Adaptation = Lora | Adapters | PrefixTuning | PromptTuning


METHODS: dict[str, type] = {
    "lora": Lora,
    "adapters": Adapters,
    "prefix": PrefixTuning,
    "prompt": PromptTuning,
}


def encoder_parts(config: EncoderConfig) -> list[str]:
    """The names of :data:`ENCODER_PARTS` that an encoder of this configuration has."""
    has = {"token_type": bool(config.type_vocab_size), "pooler": config.pooler}
    return [name for name in ENCODER_PARTS if has.get(name, True)]


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def encoder_part(encoder: "Encoder", target: str) -> nn.Embedding | nn.Linear:
    """The module of a LoRA target outside the layers. Raises: ValueError if the encoder does not have it."""
    owner, _, name = ENCODER_PARTS[target].rpartition(".")
    part = getattr(getattr(encoder, owner) if owner else encoder, name, None)
    if part is None:
        raise ValueError(
            f"LoRA cannot be added to {target!r} of this {type(encoder).__name__}, which has no such module: leave "
            "it out of targets"
        )
    return part
