"""What every architecture file says: names of configuration values and weights, layer descriptions, heads, traps.

Inside, every encoder has the same canonical modules, with q, k and v in one matrix. In a Hugging Face checkpoint a
weight's name is its module's path, so one table serves both loading a file and finding the modules of a live model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fastenc.nn.layer_spec import (
    ACTIVATIONS,
    AttentionSpec,
    FeedForwardSpec,
    LayerDropout,
    LayerSpec,
    NormSpec,
)
from fastenc.nn.relative_bias import RelativeBiasSpec
from fastenc.nn.rotary import RotarySpec

if TYPE_CHECKING:
    from fastenc.models.config import EncoderConfig

# A module of ours → the checkpoint's one, or several whose tensors stand one above the other in ours.
Names = dict[str, str | tuple[str, ...]]

BERT_CONFIG = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "activation": "hidden_act",
    "eps": "layer_norm_eps",
    "hidden_dropout_p": "hidden_dropout_prob",
    "attention_dropout_p": "attention_probs_dropout_prob",
    "classifier_dropout_p": "classifier_dropout",
    "initializer_range": "initializer_range",
}
BERT_EMBEDDINGS: Names = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
}


@dataclass(frozen=True)
class Biases:
    """Which linear layers and norms of an encoder have a bias."""

    qkv: bool = True
    attention_out: bool = True
    up: bool = True
    down: bool = True
    norm: bool = True
    embedding_norm: bool = True


@dataclass(frozen=True)
class HeadSpec:
    """The layer before a head's last linear layer: Norm(act(x W + b)). Norm, activation, weight or bias may be missing.

    Fields:
        names: "dense", "norm" and "out" (or "decoder" and "bias") → the checkpoint's names, without the prefix.
        activation: a name of the kernels, or "tanh"; None: the configuration's.
        dense_bias: whether the dense layer has one.
        dropout_before, dropout_after: whether dropout precedes the dense layer, and the last one.
        pooler: the head reads the encoder's pooler in place of a token's vector.
    """

    names: dict[str, str]
    activation: str | None = "gelu"
    dense_bias: bool = True
    dropout_before: bool = False
    dropout_after: bool = True
    pooler: bool = False


class Architecture:
    """One family of encoders. Everything that its checkpoints decide is read from the configuration.

    Attributes:
        name: config.json's model_type.
        class_prefix: what precedes a model class's kind in the class names of transformers ("Bert").
        remote_name: model_type in files of the hub's remote code, where that has another.
        prefix: what precedes the encoder's names in a checkpoint with a head.
        bare_class: transformers' class of the encoder alone, without ``class_prefix``.
        live_path: where transformers' base model keeps the encoder, "" if it is the encoder itself.
        config_names: our field → config.json's.
        defaults: our fields that config.json may leave out.
        new_config: fields of a new model that differ from EncoderConfig's defaults.
        lm_head, classifier, token_classifier, question_answerer: the heads; None where the family has none.
    """

    name: ClassVar[str]
    class_prefix: ClassVar[str]
    remote_name: ClassVar[str | None] = None
    prefix: ClassVar[str]
    bare_class: ClassVar[str] = "Model"
    live_path: ClassVar[str] = ""
    config_names: ClassVar[dict[str, str]] = BERT_CONFIG
    defaults: ClassVar[dict[str, Any]] = {"eps": 1e-12, "pad_token_id": 0}
    new_config: ClassVar[dict[str, Any]] = {}
    has_pooler: ClassVar[bool] = True
    has_token_types: ClassVar[bool] = True
    positions_after_padding: ClassVar[bool] = False
    lm_head: ClassVar[HeadSpec | None] = None
    classifier: ClassVar[HeadSpec | None] = None
    token_classifier: ClassVar[HeadSpec | None] = HeadSpec({"out": "classifier"})
    question_answerer: ClassVar[HeadSpec | None] = HeadSpec(
        {"out": "qa_outputs"}, dropout_after=False
    )
    supported: ClassVar[dict[str, Any]] = {
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    }

    # Configuration

    def present_config(self, values: dict[str, Any]) -> dict[str, Any]:
        """A config.json of the hub's remote code in transformers' present names; any other as it is."""
        return values

    def check_supported(self, values: dict[str, Any]) -> None:
        """Raises: ValueError for a variant that this encoder does not compute."""
        for key, supported in self.supported.items():
            if values.get(key, supported) not in (supported, None):
                raise ValueError(
                    f"config.json: {key} must be {supported!r}, got {values[key]!r}: this encoder computes "
                    "bidirectional attention, and no other variant of it"
                )

    def read(self, values: dict[str, Any]) -> dict[str, Any]:
        """EncoderConfig's fields from the values of a config.json."""
        fields = {
            ours: values[theirs] for ours, theirs in self.config_names.items() if theirs in values
        }
        pad = values.get("pad_token_id")
        fields["pad_token_id"] = self.defaults.get("pad_token_id", 0) if pad is None else pad
        for ours, value in self.defaults.items():
            fields.setdefault(ours, value)
        if self.positions_after_padding:
            fields["position_offset"] = self.padding_row(fields["pad_token_id"]) + 1
            fields["max_positions"] -= fields["position_offset"]
        if not self.has_token_types:
            fields["type_vocab_size"] = 0
        fields["pooler"] = self.has_pooler
        return fields

    def write(self, config: EncoderConfig) -> dict[str, Any]:
        """The values of config.json that stand for EncoderConfig's fields."""
        written = {
            theirs: getattr(config, ours)
            for ours, theirs in self.config_names.items()
            if ours != "classifier_dropout_p" or config.classifier_dropout_p is not None
        }
        written["pad_token_id"] = config.pad_token_id
        if "max_positions" in self.config_names:
            name = self.config_names["max_positions"]
            written[name] = config.max_positions + config.position_offset
        return written

    def padding_row(self, pad_token_id: int) -> int:
        """The row of the position table that stands for padding, where positions count from it."""
        return pad_token_id

    # Description

    def layer(self, config: EncoderConfig, number: int) -> LayerSpec:
        """Layer ``number``, from 0."""
        head_dim = config.head_dim
        norm = NormSpec("layer", config.eps)
        return LayerSpec(
            AttentionSpec(config.num_heads, head_dim, head_dim**-0.5),
            FeedForwardSpec(config.intermediate_size, ACTIVATIONS[config.activation]),
            norm,
            norm,
        )

    def layer_dropout(self, config: EncoderConfig) -> LayerDropout:
        p = config.hidden_dropout_p
        return LayerDropout(config.attention_dropout_p, p, 0.0, p)

    def biases(self, config: EncoderConfig) -> Biases:
        return Biases()

    def rotary(self, config: EncoderConfig, number: int) -> RotarySpec | None:
        """The angles of layer ``number``'s queries and keys."""
        return None

    def relative_bias(self, config: EncoderConfig) -> RelativeBiasSpec | None:
        """The bias by distance."""
        return None

    def relative_biases(self, config: EncoderConfig) -> int:
        """How many tables of it there are: one for all layers, or one a layer."""
        return 0 if self.relative_bias(config) is None else 1

    def first_norm(self, config: EncoderConfig) -> bool:
        """Whether the layers begin with a norm."""
        return False

    def embedding_norm(self, config: EncoderConfig) -> NormSpec | None:
        """The norm of the embeddings."""
        return NormSpec("layer", config.eps)

    def position_table(self, config: EncoderConfig) -> bool:
        return True

    def embedding_projection(self, config: EncoderConfig) -> bool:
        """Whether a linear layer follows the embeddings."""
        return config.embedding_size != config.hidden_size

    def embedding_scale(self, config: EncoderConfig) -> float:
        """Factor of the word embeddings."""
        return 1.0

    def embedding_dropout_p(self, config: EncoderConfig) -> float:
        return config.hidden_dropout_p

    def final_dropout_p(self, config: EncoderConfig) -> float:
        """Of the last layer's output."""
        return 0.0

    def live_pooled(self, model: Any, hidden: Tensor) -> Tensor:
        """What a live base model's pooler makes of (batch, length, hidden_size)."""
        return model.pooler(hidden)

    def head(self, config: EncoderConfig, spec: HeadSpec) -> HeadSpec:
        """A head as the configuration settles it."""
        return spec

    def decoder_bias(self, config: EncoderConfig) -> bool:
        """Whether the masked-LM head has a bias for each token of the vocabulary."""
        return True

    def classifier_pooling(self, config: EncoderConfig) -> str:
        """What the head for sequences reads where there is no pooler: "cls" or "mean"."""
        return "cls"

    def token_classifier_dropout_p(self, config: EncoderConfig) -> float:
        p = config.classifier_dropout_p
        return config.hidden_dropout_p if p is None else p

    def question_answerer_dropout_p(self, config: EncoderConfig) -> float:
        return config.hidden_dropout_p

    def module_of_layer(self, config: EncoderConfig, number: int) -> int:
        """The module that computes layer ``number``: another's where layers share their weights."""
        return number

    # First weights

    def initial_std(self, config: EncoderConfig, name: str) -> float:
        """Standard deviation of a weight; ``name`` is the last part of its module's ("qkv", "word", a head's "out")."""
        return config.initializer_range

    def initial_cutoff(self, config: EncoderConfig) -> float | None:
        """Standard deviations at which the normal distribution of weights is cut; None: it is not."""
        return None

    # Names

    layers_path: ClassVar[str | None] = (
        None  # where the checkpoint's layers are numbered, one for each of ours
    )

    def names(self, config: EncoderConfig) -> Names:
        """The encoder's modules."""
        raise NotImplementedError

    def dropout_names(self, config: EncoderConfig) -> dict[str, str]:
        """Where a live model keeps its dropout modules: "embeddings", "final" and the layers' ("layers.0.down") → path.

        A module that is not named has the configuration's probability.
        """
        return {}

    def modernised(self, tensors: dict[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
        """A checkpoint's tensors, without the prefix, under the present names of the family."""
        return {
            key.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
                "LayerNorm.beta", "LayerNorm.bias"
            ): value
            for key, value in tensors.items()
        }

    def written(self, tensors: dict[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
        """A checkpoint's tensors as transformers writes them, from those of :meth:`names`."""
        return tensors

    def lora_targets(self, config: EncoderConfig) -> dict[str, tuple[str, ...]]:
        """Linear layer of ours → names of the checkpoint's layers that it stands for, in their order."""
        names = self.names(config)
        first = {name: names[f"layers.0.{name}"] for name in ("qkv", "up")}
        several = {"qkv": ("query", "key", "value"), "up": ("gate", "up")}
        return {
            "qkv": several["qkv"] if isinstance(first["qkv"], tuple) else ("qkv",),
            "attention_out": ("attention_out",),
            "up": several["up"] if isinstance(first["up"], tuple) else ("up",),
            "down": ("down",),
        }


def dropouts_in_layers(count: int, path: str, names: dict[str, str]) -> dict[str, str]:
    """:meth:`Architecture.dropout_names` of every layer, at ``path`` with {i} for the layer's number."""
    return {
        f"layers.{i}.{field}": f"{path}.{name}".format(i=i)
        for i in range(count)
        for field, name in names.items()
    }


def in_layers(count: int, path: str, names: Names) -> Names:
    """The names of every layer: ``path`` and the names may hold {i}, the layer's number, and {next}, the one after."""
    table: Names = {}
    for i in range(count):
        fill = lambda name, i=i: f"{path}.{name}".format(i=i, next=i + 1)
        for ours, theirs in names.items():
            table[f"layers.{i}.{ours}"] = (
                fill(theirs) if isinstance(theirs, str) else tuple(map(fill, theirs))
            )
    return table
