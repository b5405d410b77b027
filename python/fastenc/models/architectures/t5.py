"""The encoders of T5 (v1.0 and v1.1, Flan), mT5 and umT5. Sources: Raffel et al. 2020, arXiv:1910.10683; Shazeer 2020,
arXiv:2002.05202 (gated layers); Xue et al. 2021, arXiv:2010.11934 (mT5).

The layers are pre-norm with RMSNorm and without biases. Attention scores are not scaled, and there is no position
table. From a checkpoint of a whole T5 only the encoder is read.
"""

from typing import ClassVar

from torch import Tensor

from fastenc.models.architectures.base import Architecture
from fastenc.models.architectures.modules import Biases
from fastenc.models.architectures.names import Names, dropouts_in_layers, in_layers
from fastenc.models.architectures.values import (
    ACTIVATION,
    COUNT,
    NOT_NEGATIVE,
    SWITCH,
    TEXT,
    ConfigValues,
    integer,
    shown,
)
from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.layer_spec import AttentionSpec, FeedForwardSpec, LayerSpec, NormSpec
from fastenc.nn.relative_bias import RelativeBiasSpec
from fastenc.ops.activation import ACTIVATIONS

# There is no position table that limits the length. Texts are cut at the pretraining length.
PRETRAINED_LENGTH = 512
SHARED, IN_ENCODER = "shared.weight", "encoder.embed_tokens.weight"


class T5(Architecture):
    name = "t5"
    class_prefix = "T5"
    prefix = ""
    bare_class = "EncoderModel"
    config_names = {
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "num_layers": "num_layers",
        "num_heads": "num_heads",
        "head_dim": "d_kv",
        "intermediate_size": "d_ff",
        "eps": "layer_norm_epsilon",
        "hidden_dropout_p": "dropout_rate",
        "classifier_dropout_p": "classifier_dropout",
    }
    defaults = {"eps": 1e-6, "pad_token_id": 0, "max_positions": PRETRAINED_LENGTH}
    new_config = {"type_vocab_size": 0, "eps": 1e-6, "pooler": False, "activation": "relu"}
    feed_forward_default = "relu"
    # transformers' heads for T5 read its decoder.
    token_classifier = None
    question_answerer = None
    has_pooler = False
    has_token_types = False
    has_decoder = True
    eos_token_id = 1
    layers_path = "encoder.block"
    supported = {"is_decoder": False}
    rules = {
        "feed_forward_proj": TEXT,
        "dense_act_fn": ACTIVATION,
        "is_gated_act": SWITCH,
        "relative_attention_num_buckets": integer("an integer of at least 4", 4),
        "relative_attention_max_distance": COUNT,
        "num_decoder_layers": COUNT.or_none(),
        "scale_decoder_outputs": SWITCH,
        "initializer_factor": NOT_NEGATIVE,
    }
    scales_outputs: ClassVar[bool] = True

    def check_supported(self, values: ConfigValues) -> None:
        super().check_supported(values)
        buckets = values.get("relative_attention_num_buckets", 32)
        distance = values.get("relative_attention_max_distance", 128)
        if distance <= buckets // 4:
            raise ValueError(
                "config.json: relative_attention_max_distance must be more than a quarter of "
                f"relative_attention_num_buckets, got {distance} and {buckets}: is the file damaged?"
            )
        # transformers writes the meaning of feed_forward_proj into two more keys, and computes with these.
        gated, activation = self._feed_forward(values)
        named = values.get("dense_act_fn", activation)
        for key, agrees in {
            "is_gated_act": values.get("is_gated_act", gated) is gated,
            "dense_act_fn": ACTIVATIONS.get(named, named)
            == ACTIVATIONS.get(activation, activation),
        }.items():
            if not agrees:
                raise ValueError(
                    f"config.json: {key} must agree with feed_forward_proj, got {values[key]!r} and "
                    f"{values.get('feed_forward_proj', self.feed_forward_default)!r}: correct the wrong one"
                )

    def read(self, values: ConfigValues) -> ConfigValues:
        fields = super().read(values)
        _, fields["activation"] = self._feed_forward(values)
        fields["attention_dropout_p"] = fields.get("hidden_dropout_p", 0.1)
        return fields

    def _feed_forward(self, values: ConfigValues) -> tuple[bool, str]:
        """(whether the feed-forward layer is gated, its activation); "gated-gelu" means GELU's tanh form."""
        projection = values.get("feed_forward_proj", self.feed_forward_default)
        gated, activation = projection.startswith("gated-"), projection.removeprefix("gated-")
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"config.json: feed_forward_proj must be an activation, one of {sorted(ACTIVATIONS)}, or gated- and "
                f"an activation, got {shown(projection)}"
            )
        return gated, "gelu_new" if projection == "gated-gelu" else activation

    def layer(self, config, number: int) -> LayerSpec:
        gated, _ = self._feed_forward(config.extra)
        norm = NormSpec("rms", config.eps)
        return LayerSpec(
            AttentionSpec(config.num_heads, config.head_dim, 1.0),
            FeedForwardSpec(config.intermediate_size, ACTIVATIONS[config.activation], gated),
            norm,
            norm,
            pre_norm=True,
        )

    def layer_dropout(self, config) -> LayerDropout:
        p = config.hidden_dropout_p
        cross = p if config.is_decoder else 0.0
        return LayerDropout(p, p, p, p, cross=cross, cross_out=cross)

    def biases(self, config) -> Biases:
        return Biases(*[False] * 6)

    def relative_bias(self, config) -> RelativeBiasSpec:
        return RelativeBiasSpec(
            config.extra.get("relative_attention_num_buckets", 32),
            config.extra.get("relative_attention_max_distance", 128),
            bidirectional=not config.is_decoder,
        )

    def first_norm(self, config) -> bool:
        return True

    def embedding_norm(self, config) -> None:
        return None

    def position_table(self, config) -> bool:
        return False

    def initial_stds(self, config, name: str) -> tuple[float, ...]:
        """inputs^-0.5 for a matrix; (inputs * head_dim)^-0.5 for queries, because T5 does not scale scores; 1 for the
        word embeddings. ``initializer_factor`` multiplies all. Source: transformers, as Mesh TensorFlow."""
        width, inner = config.hidden_size, config.num_heads * config.head_dim
        usual, query = width**-0.5, (width * config.head_dim) ** -0.5
        stds = {
            "word": (1.0,),
            "lm_head": (1.0,),
            "qkv": (query, usual, usual),
            "query": (query,),
            "attention_out": (inner**-0.5,),
            "out": (inner**-0.5,),
            "down": (config.intermediate_size**-0.5,),
        }
        factor = self.initial_norm(config)
        return tuple(factor * std for std in stds.get(name.rpartition(".")[2], (usual,)))

    def initial_norm(self, config) -> float:
        return config.extra.get("initializer_factor", 1.0)

    def final_dropout_p(self, config) -> float:
        return config.hidden_dropout_p

    def names(self, config) -> Names:
        gated, _ = self._feed_forward(config.extra)
        stack, last = self._parts(config)
        attention, inner = "0.SelfAttention", f"{last}.DenseReluDense"
        # The first norm of a sublayer or layer is described as the last norm of the preceding one (nn/layer_spec.py).
        layer: Names = {
            "qkv": tuple(f"{attention}.{name}" for name in "qkv"),
            "attention_out": f"{attention}.o",
            "attention_norm": "1.layer_norm",
            "up": (f"{inner}.wi_0", f"{inner}.wi_1") if gated else f"{inner}.wi",
            "down": f"{inner}.wo",
        }
        if config.is_decoder:
            cross = "1.EncDecAttention"
            layer |= {
                "cross.query": f"{cross}.q",
                "cross.key_value": (f"{cross}.k", f"{cross}.v"),
                "cross.out": f"{cross}.o",
                "cross.norm": "2.layer_norm",
            }
        count, block = config.num_layers, f"{stack}.block"
        names = in_layers(count, f"{block}.{{i}}.layer", layer)
        names |= {
            f"layers.{i}.out_norm": f"{block}.{i + 1}.layer.0.layer_norm" for i in range(count - 1)
        }
        return {
            "embeddings.word": f"{stack}.embed_tokens",
            "first_norm": f"{block}.0.layer.0.layer_norm",
            **names,
            f"layers.{count - 1}.out_norm": f"{stack}.final_layer_norm",
            **{
                f"relative_biases.{i}": f"{block}.{i}.layer.{attention}.relative_attention_bias"
                for i in range(self.relative_biases(config))
            },
        }

    def _parts(self, config) -> tuple[str, int]:
        """The stack's name, and the number of the feed-forward sublayer in a block."""
        return ("decoder", 2) if config.is_decoder else ("encoder", 1)

    def dropout_names(self, config) -> dict[str, str]:
        stack, last = self._parts(config)
        names = {
            "attention_out": "0.dropout",
            "inner": f"{last}.DenseReluDense.dropout",
            "down": f"{last}.dropout",
        }
        if config.is_decoder:
            names["cross_out"] = "1.dropout"
        layers = dropouts_in_layers(config.num_layers, f"{stack}.block.{{i}}.layer", names)
        # transformers uses this module after the last layer too.
        return {"embeddings": f"{stack}.dropout", "final": f"{stack}.dropout", **layers}

    def renamed(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        # Encoder and decoder share the word embeddings; most files have them once.
        return {IN_ENCODER if name == SHARED else name: tensor}

    def export_state_dict(self, tensors: dict[str, Tensor], config) -> dict[str, Tensor]:
        return {SHARED if key == IN_ENCODER else key: value for key, value in tensors.items()}

    def decoder_sizes(self, config) -> ConfigValues:
        spec = self.relative_bias(config)
        if spec.max_distance <= spec.num_buckets // 2:
            raise ValueError(
                "config.json: a decoder's relative_attention_max_distance must be more than half of "
                f"relative_attention_num_buckets, got {spec.max_distance} and {spec.num_buckets}: is the file damaged?"
            )
        layers = config.extra.get("num_decoder_layers")
        return {"num_layers": config.num_layers if layers is None else layers}

    def decoder_start(self, config) -> int | None:
        start = super().decoder_start(config)
        return config.pad_token_id if start is None else start

    def output_scale(self, config) -> float:
        # transformers writes "scale_decoder_outputs", and derives it from "tie_word_embeddings" where it is missing.
        tied = config.extra.get("tie_word_embeddings") is not False
        scales = config.extra.get("scale_decoder_outputs", tied) and self.scales_outputs
        return config.hidden_size**-0.5 if scales else 1.0


class UMT5(T5):
    """mT5 with a table of relative biases in every layer. Source: Chung et al. 2023, arXiv:2304.09151."""

    name = "umt5"
    class_prefix = "UMT5"
    feed_forward_default = "gated-gelu"
    new_config = T5.new_config | {"activation": "gelu_new"}

    def relative_biases(self, config) -> int:
        return config.num_layers


class MT5(T5):
    name = "mt5"
    class_prefix = "MT5"
    scales_outputs = False
    feed_forward_default = "gated-gelu"
    new_config = T5.new_config | {"activation": "gelu_new"}
