"""ModernBERT and models derived from it. Source: Warner et al. 2024, arXiv:2412.13663.

The layers are pre-norm without a first norm, with gated feed-forward and rotary positions. Most layers have an
attention window; by default every third layer sees the whole sequence. All values are read from the configuration,
because they differ between checkpoints. Older files have other keys for the rotary angles and the kinds of layers.
"""

import math
from dataclasses import replace

from fastenc.models.architectures.base import Architecture
from fastenc.models.architectures.modules import Biases, HeadSpec
from fastenc.models.architectures.names import BERT_CONFIG, Names, dropouts_in_layers, in_layers
from fastenc.models.architectures.rotary import read_rotary, read_scaling
from fastenc.models.architectures.values import (
    ACTIVATION,
    AT_LEAST_0,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    SWITCH,
    TABLE,
    ConfigValues,
    Rule,
    check,
    one_of,
)
from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.layer_spec import AttentionSpec, FeedForwardSpec, LayerSpec, NormSpec
from fastenc.nn.rotary import RotarySpec
from fastenc.ops.activation import ACTIVATIONS

FULL, SLIDING = "full_attention", "sliding_attention"
# Kind of layer → (key of its theta in older files, default).
OLD_THETA = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
WIDEST = 2**30  # a window that hides nothing, and that the kernels' integers hold
HEAD = {"dense": "head.dense", "norm": "head.norm"}
LAYER_TYPES = Rule(
    f"a list of {FULL!r} and {SLIDING!r}",
    lambda value: (
        isinstance(value, list) and all(layer_type in (FULL, SLIDING) for layer_type in value)
    ),
).or_none()


class ModernBert(Architecture):
    name = "modernbert"
    class_prefix = "ModernBert"
    prefix = "model"
    layers_path = "layers"
    config_names = {
        **{ours: theirs for ours, theirs in BERT_CONFIG.items() if ours != "type_vocab_size"},
        "activation": "hidden_activation",
        "eps": "norm_eps",
        "hidden_dropout_p": "embedding_dropout",
        "attention_dropout_p": "attention_dropout",
    }
    defaults = {
        "eps": 1e-5,
        "pad_token_id": 50283,
        "activation": "gelu",
        "max_positions": 8192,
        "hidden_dropout_p": 0.0,
        "attention_dropout_p": 0.0,
        "classifier_dropout_p": 0.0,
    }
    new_config = {"type_vocab_size": 0, "eps": 1e-5, "max_positions": 8192}
    has_pooler = False
    has_token_types = False
    # No position_embedding_type: positions are always rotary, and mmBERT's files have "sans_pos".
    supported = {"is_decoder": False, "add_cross_attention": False}
    lm_head = HeadSpec({**HEAD, "decoder": "decoder", "bias": "decoder.bias"})
    classifier = HeadSpec({**HEAD, "out": "classifier"})
    token_classifier = HeadSpec({**HEAD, "out": "classifier"})
    question_answerer = HeadSpec({**HEAD, "out": "classifier"})

    def read(self, values: ConfigValues) -> ConfigValues:
        fields = super().read(values)
        if "norm_eps" not in values and "layer_norm_eps" in values:
            fields["eps"] = values["layer_norm_eps"]
        return fields

    rules = {
        "layer_norm_eps": NOT_NEGATIVE,
        "local_attention": AT_LEAST_0,
        "global_attn_every_n_layers": COUNT,
        "mlp_dropout": PROBABILITY,
        **dict.fromkeys(
            ("attention_bias", "mlp_bias", "norm_bias", "decoder_bias", "classifier_bias"), SWITCH
        ),
        "sparse_prediction": SWITCH,
        "initializer_cutoff_factor": POSITIVE.or_none(),
        "classifier_activation": ACTIVATION,
        "classifier_pooling": one_of(("cls", "mean")),
        "layer_types": LAYER_TYPES,
        "rope_parameters": TABLE,
        "rope_scaling": TABLE,
        "global_rope_theta": POSITIVE,
        "local_rope_theta": POSITIVE,
    }

    def check_values(self, values: ConfigValues) -> None:
        super().check_values(values)
        check_layer_types(values)
        check(values.get("rope_parameters") or {}, dict.fromkeys(OLD_THETA, TABLE), "config.json: ")

    def check_supported(self, values: ConfigValues) -> None:
        super().check_supported(values)
        for layer_type in OLD_THETA:
            read_scaling(_rope(values, layer_type), self.defaults["max_positions"])

    def layer(self, config, number: int) -> LayerSpec:
        side = min(config.extra.get("local_attention", 128) // 2, WIDEST)
        window = (side, side) if self._layer_type(config, number) == SLIDING else (-1, -1)
        norm = NormSpec("layer", config.eps)
        activation = ACTIVATIONS[config.activation]
        return LayerSpec(
            AttentionSpec(config.num_heads, config.head_dim, config.head_dim**-0.5, window),
            FeedForwardSpec(config.intermediate_size, activation, gated=True),
            norm,
            norm,
            pre_norm=True,
        )

    def layer_lists(self, config) -> dict[str, list[str]]:
        layers = range(config.num_layers)
        return {"layer_types": [self._layer_type(config, number) for number in layers]}

    def layer_dropout(self, config) -> LayerDropout:
        p, inner = config.attention_dropout_p, float(config.extra.get("mlp_dropout", 0.0))
        return LayerDropout(p, p, inner, 0.0)

    def biases(self, config) -> Biases:
        given = lambda key: bool(config.extra.get(key, False))
        attention, mlp, norm = given("attention_bias"), given("mlp_bias"), given("norm_bias")
        return Biases(attention, attention, mlp, mlp, norm, norm)

    def rotary(self, config, number: int) -> RotarySpec:
        layer_type = self._layer_type(config, number)
        old, default = OLD_THETA[layer_type]
        theta = config.extra.get(old, default)
        return read_rotary(
            _rope(config.extra, layer_type), config.head_dim, theta, config.max_positions
        )

    def initial_stds(self, config, name: str) -> tuple[float, ...]:
        last = name.rpartition(".")[2]
        if last in ("attention_out", "down", "dense", "decoder"):
            return (config.initializer_range / math.sqrt(2.0 * config.num_layers),)
        return (config.hidden_size**-0.5 if last == "out" else config.initializer_range,)

    def initial_cutoff(self, config) -> float:
        cutoff = config.extra.get("initializer_cutoff_factor", 2.0)
        return 3.0 if cutoff is None else cutoff

    def position_table(self, config) -> bool:
        return False

    def head(self, config, spec: HeadSpec) -> HeadSpec:
        activation = config.extra.get("classifier_activation", "gelu")
        bias = bool(config.extra.get("classifier_bias", False))
        return replace(spec, activation=ACTIVATIONS[activation], dense_bias=bias)

    def decoder_bias(self, config) -> bool:
        return bool(config.extra.get("decoder_bias", True))

    def classifier_pooling(self, config) -> str:
        return config.extra.get("classifier_pooling", "cls")

    def question_answerer_dropout_p(self, config) -> float:
        return config.classifier_dropout_p or 0.0

    def dropout_names(self, config) -> dict[str, str]:
        inner = dropouts_in_layers(config.num_layers, "layers.{i}", {"inner": "mlp.drop"})
        return {"embeddings": "embeddings.drop", **inner}

    def names(self, config) -> Names:
        layer: Names = {
            "qkv": "attn.Wqkv",
            "attention_out": "attn.Wo",
            "attention_norm": "mlp_norm",
            "up": "mlp.Wi",
            "down": "mlp.Wo",
        }
        names = in_layers(config.num_layers, "layers.{i}", layer)
        for i in range(config.num_layers):
            names[f"layers.{i}.out_norm"] = f"layers.{i + 1}.attn_norm"
        names[f"layers.{config.num_layers - 1}.out_norm"] = "final_norm"
        return {
            "embeddings.word": "embeddings.tok_embeddings",
            "embeddings.norm": "embeddings.norm",
            **names,
        }

    def _layer_type(self, config, number: int) -> str:
        kinds = config.extra.get("layer_types")
        if kinds:
            return kinds[number]
        every = int(config.extra.get("global_attn_every_n_layers", 3))
        return SLIDING if number % every else FULL


def check_layer_types(values: ConfigValues) -> None:
    """Raise ValueError unless ``layer_types``, where it is given, has one for each layer."""
    types, layers = values.get("layer_types"), values.get("num_hidden_layers")
    if types and len(types) != layers:
        raise ValueError(
            f"config.json: layer_types must have a name for each of the {layers} layers, got {len(types)}: is the "
            "file damaged?"
        )


def _rope(values: ConfigValues, layer_type: str) -> ConfigValues:
    """The rope_parameters for a type of layers. Older files have one ``rope_scaling`` for both types."""
    rope = values.get("rope_parameters") or {}
    given = {
        **(rope.get(layer_type) or {"rope_type": "default"}),
        **(values.get("rope_scaling") or {}),
    }
    # transformers reads this key beside the kinds of layers, not inside them.
    return {**given, "truncate": rope.get("truncate", True)}
