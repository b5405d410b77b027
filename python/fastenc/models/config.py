"""The configuration of an encoder, read from and written to config.json in the family's format."""

from dataclasses import dataclass, field, fields
from typing import Any

from fastenc.models.architectures import ARCHITECTURES, Architecture, architecture_named
from fastenc.models.architectures.values import FIELDS, check
from fastenc.nn.layer_spec import LayerSpec

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "intermediate_size",
    "max_positions",
)
LAYER_MIX = "layer_mix"  # key in config.json, and prefix of the weights' names


@dataclass(frozen=True)
class EncoderConfig:
    """The sizes and constants of an encoder. The defaults are those of BERT-base.

    Fields:
        family: a name of ``fastenc.models.architectures.ARCHITECTURES``, config.json's model_type.
        max_positions: number of tokens of the longest sequence.
        position_offset: row of the position table that token 0 takes (RoBERTa keeps the rows before it for padding).
        type_vocab_size: number of rows of the token-type table, 0 for none.
        embedding_size: width of the embeddings; if it differs from hidden_size (ELECTRA), they are projected; 0:
            hidden_size.
        activation: a key of ``fastenc.ops.activation.ACTIVATIONS``.
        head_dim: width of a head; 0: hidden_size / num_heads.
        pooler: whether the encoder has a pooler, tanh(W x + b) of the first token's vector (BERT, RoBERTa).
        layer_mix: whether the encoder's output is a :class:`fastenc.nn.ScalarMix` of all states instead of the last
            state.
        is_decoder: whether this describes the decoder of an encoder-decoder (:meth:`decoder`).
        extra: all other entries of config.json, which are written back unchanged.
    Raises: ValueError naming the field, the value and the rule.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_positions: int = 512
    position_offset: int = 0
    type_vocab_size: int = 2
    embedding_size: int = 0
    activation: str = "gelu"
    eps: float = 1e-12
    hidden_dropout_p: float = 0.1
    attention_dropout_p: float = 0.1
    classifier_dropout_p: float | None = None
    pad_token_id: int = 0
    initializer_range: float = 0.02
    pooler: bool = True
    layer_mix: bool = False
    family: str = "bert"
    head_dim: int = 0
    is_decoder: bool = False
    extra: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        architecture_named(self.family)
        if not self.embedding_size:
            object.__setattr__(self, "embedding_size", self.hidden_size)
        check(vars(self), FIELDS)
        if not self.head_dim:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size must be a multiple of num_heads, got {self.hidden_size} and {self.num_heads}: "
                    "change one of them, or give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.family]

    @property
    def output_size(self) -> int:
        """The width of the encoder's output: ``hidden_size``, or that of a linear layer after the last norm."""
        return self.architecture.output_projection(self) or self.hidden_size

    def decoder(self) -> "EncoderConfig":
        """The configuration of the decoder that belongs to this encoder.

        Raises: ValueError for a family without decoders.
        """
        if not self.architecture.has_decoder:
            families = sorted(name for name, a in ARCHITECTURES.items() if a.has_decoder)
            raise ValueError(
                f"an encoder-decoder must be of one of the families {families}, got {self.family!r}: take a "
                "checkpoint of one of them"
            )
        return self.replace(is_decoder=True, **self.architecture.decoder_sizes(self))

    def layer_spec(self, number: int) -> LayerSpec:
        """The description of layer ``number``, from 0."""
        return self.architecture.layer(self, number)

    @classmethod
    def from_hf(cls, values: dict[str, Any]) -> "EncoderConfig":
        """The configuration that the contents of a Hugging Face config.json describe.

        Raises: ValueError for an unknown family, a missing or wrong value, or an unsupported variant of a family.
        """
        architecture = architecture_named(values.get("model_type", ""))
        architecture.check_values(values)
        architecture.check_supported(values)
        names = architecture.config_names
        missing = [
            names[ours]
            for ours in SIZES
            if ours in names and names[ours] not in values and ours not in architecture.defaults
        ]
        if missing:
            raise ValueError(f"config.json must give {', '.join(missing)}: is the file complete?")
        known = {*names.values(), "pad_token_id", "model_type", LAYER_MIX}
        extra = {key: value for key, value in values.items() if key not in known}
        mix = bool(values.get(LAYER_MIX, False))
        return cls(
            **architecture.read(values), layer_mix=mix, family=architecture.name, extra=extra
        )

    def to_hf(self) -> dict[str, Any]:
        """The contents of the family's config.json."""
        mix = {LAYER_MIX: True} if self.layer_mix else {}
        constants = self.architecture.constants.values()
        extra = {key: value for key, value in self.extra.items() if key not in constants}
        return {**extra, **self.architecture.write(self), **mix, "model_type": self.family}

    def replace(self, **changes: Any) -> "EncoderConfig":
        """A copy with some fields changed. head_dim follows hidden_size and num_heads if it did before."""
        is_derived = self.head_dim * self.num_heads == self.hidden_size
        if is_derived and {"hidden_size", "num_heads"} & changes.keys():
            changes.setdefault("head_dim", 0)
        return EncoderConfig(**{**{f.name: getattr(self, f.name) for f in fields(self)}, **changes})
