"""The base class of the architecture files: names of configuration values and weights, layer descriptions, heads.

All our encoders have the same modules, with q, k and v in one matrix. In a Hugging Face checkpoint a weight's name is
the path of its module. So one table of names is used for loading a file and for finding the modules of a live model.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fastenc.models.architectures.modules import Biases, HeadSpec, PositionModules
from fastenc.models.architectures.names import BERT_CONFIG, Names
from fastenc.models.architectures.values import FIELDS, ID, SWITCH, ConfigValues, Rule, check, shown
from fastenc.nn.convolution import ConvolutionSpec
from fastenc.nn.layer_dropout import LayerDropout
from fastenc.nn.layer_spec import AttentionSpec, FeedForwardSpec, LayerSpec, NormSpec
from fastenc.nn.relative_bias import RelativeBiasSpec
from fastenc.nn.relative_positions import RelativePositionSpec
from fastenc.nn.rotary import RotarySpec
from fastenc.nn.stack import StackSpec
from fastenc.ops.activation import ACTIVATIONS

if TYPE_CHECKING:
    from fastenc.models.config import EncoderConfig


# The path of the module that computes a layer's q, k and v.
QKV = re.compile(r"(?:^|\.)layers\.(\d+)\.qkv$")

# The model of encoder and decoder with a language-model head, by the name that most families give to its class.
WHOLE = "ForConditionalGeneration"


class Architecture:
    """The description of one family of encoders. Values that differ between its checkpoints come from config.json.

    Attributes:
        name: model_type in config.json.
        class_prefix: first part of the names of transformers' classes ("Bert").
        remote_name: model_type in checkpoints of the hub's remote code, or None.
        prefix: prefix of the encoder's weights in a checkpoint with a head.
        head_prefixes: class of a head ("ForQuestionAnswering") → its prefix, where it is another.
        bare_class: name of transformers' class of the encoder without head, without ``class_prefix``.
        whole_class: the same of the class of encoder and decoder with a language-model head.
        live_path: path of the encoder in transformers' base model, "" if the base model is the encoder.
        config_names: field of EncoderConfig → key in config.json.
        defaults: values of fields that config.json may leave out.
        new_config: fields of a new model that differ from EncoderConfig's defaults.
        has_pooler, has_token_types: whether the family has a pooler and token types.
        has_unread_pooler: whether transformers' classes with a head have a pooler even if the head does not read it.
        takes_left_padding: whether padding on the left can be removed: only distances between tokens count, and no head
            of transformers' reads the first position of a row with tokens.
        embeds_padding: whether transformers embeds padding like other tokens.
        positions_after_padding: whether positions count from the row after the padding token's (RoBERTa).
        grows_positions: whether transformers' position table grows in a call with longer texts.
        lm_head, classifier, token_classifier, question_answerer: the heads, or None if the family has no such head.
        detector: the head that detects replaced tokens, or None. Its norm, if it has one, comes before the dense layer
            and also adds the first token's vector.
        pair_head: name of the classifier of pairs of segments in checkpoints of pretraining, or None.
        supported: key in config.json → the only value that is supported.
        rules: key in config.json → the rule for its value, for keys that are no fields of EncoderConfig.
        unread: beginnings of the names of weights that the encoder does not read where it has no module for them.
        has_decoder: whether the family's models have a decoder. The methods describe it for a configuration with
            ``is_decoder``.
        whole_prefix: prefix of the weights of encoder and decoder in a checkpoint of both with a head.
        eos_token_id: the token that ends a target where config.json does not say it.
        target_start: the first token of a decoder's input where config.json does not say it: the "end" token, the
            "padding" token, or the "language" of the target.
        constants: a checkpoint's tensor that is no parameter, but describes the layers → key in EncoderConfig.extra for
            its values.
        word_splitter: what splits texts into words in transformers' tokenizer of the family, where no tokenizer.json
            can hold it, or None.
        task_keys: keys of config.json that describe adaptations for tasks (:meth:`tasks`), which only an encoder
            without a head keeps.
    """

    name: ClassVar[str]
    class_prefix: ClassVar[str]
    remote_name: ClassVar[str | None] = None
    prefix: ClassVar[str]
    head_prefixes: ClassVar[dict[str, str]] = {}
    bare_class: ClassVar[str] = "Model"
    whole_class: ClassVar[str] = WHOLE
    live_path: ClassVar[str] = ""
    config_names: ClassVar[dict[str, str]] = BERT_CONFIG
    defaults: ClassVar[ConfigValues] = {"eps": 1e-12, "pad_token_id": 0}
    new_config: ClassVar[ConfigValues] = {}
    has_pooler: ClassVar[bool] = True
    has_token_types: ClassVar[bool] = True
    has_unread_pooler: ClassVar[bool] = False
    takes_left_padding: ClassVar[bool] = False
    embeds_padding: ClassVar[bool] = True
    positions_after_padding: ClassVar[bool] = False
    grows_positions: ClassVar[bool] = False
    lm_head: ClassVar[HeadSpec | None] = None
    classifier: ClassVar[HeadSpec | None] = None
    detector: ClassVar[HeadSpec | None] = None
    pair_head: ClassVar[str | None] = None
    token_classifier: ClassVar[HeadSpec | None] = HeadSpec({"out": "classifier"})
    question_answerer: ClassVar[HeadSpec | None] = HeadSpec(
        {"out": "qa_outputs"}, dropout_after=False
    )
    supported: ClassVar[dict[str, object]] = {
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    }

    rules: ClassVar[dict[str, Rule]] = {}
    unread: ClassVar[tuple[str, ...]] = ()
    has_decoder: ClassVar[bool] = False
    whole_prefix: ClassVar[str] = ""
    eos_token_id: ClassVar[int | None] = None
    target_start: ClassVar[str] = "padding"
    constants: ClassVar[dict[str, str]] = {}
    word_splitter: ClassVar[str | None] = None
    task_keys: ClassVar[tuple[str, ...]] = ()

    # Configuration

    def takes_inputs_embeds(self, config: EncoderConfig) -> bool:
        """Whether transformers' encoder computes the same for vectors instead of token ids."""
        return True

    def check_values(self, values: ConfigValues) -> None:
        """Raise ValueError for a value of config.json that has a wrong type or is out of bounds."""
        fields = {theirs: FIELDS[ours] for ours, theirs in self.config_names.items()}
        common = {"pad_token_id": ID, "tie_word_embeddings": SWITCH}
        check(values, {**common, **fields, **self.rules}, "config.json: ")

    def unwritten_values(self, config: Any) -> ConfigValues:
        """Values that some versions of transformers change when they write a configuration. config: one of theirs."""
        return {}

    def describes(self, values: ConfigValues) -> bool:
        """Whether a config.json is one of this family."""
        model_type = values.get("model_type")
        return model_type is not None and model_type in (self.name, self.remote_name)

    def normalize_config(self, values: ConfigValues) -> ConfigValues:
        """The values of config.json in transformers' current names; those of the hub's remote code are converted."""
        return values

    def check_supported(self, values: ConfigValues) -> None:
        """Raise ValueError for a config.json of a variant that is not supported."""
        for key, supported in self.supported.items():
            if values.get(key, supported) not in (supported, None):
                raise ValueError(
                    f"config.json: {key} must be {supported!r}, got {shown(values[key])}: this variant of the "
                    "architecture is not supported, take transformers for this model"
                )

    def class_name(self, head: str) -> str:
        """The name of transformers' class for a head ("ForMaskedLM"); "Model": of the encoder alone."""
        named = {"Model": self.bare_class, WHOLE: self.whole_class}
        return self.class_prefix + named.get(head, head)

    def head_of(self, class_name: str) -> str:
        """The head of a class: the reverse of :meth:`class_name`."""
        name = class_name.removeprefix(self.class_prefix)
        return {self.bare_class: "Model", self.whole_class: WHOLE}.get(name, name)

    def read(self, values: ConfigValues) -> ConfigValues:
        """The fields of EncoderConfig from the values of a config.json."""
        fields = {
            ours: values[theirs] for ours, theirs in self.config_names.items() if theirs in values
        }
        pad = values.get("pad_token_id")
        fields["pad_token_id"] = self.defaults.get("pad_token_id", 0) if pad is None else pad
        for ours, value in self.defaults.items():
            fields.setdefault(ours, value)
        if self.positions_after_padding:
            fields["position_offset"] = self.padding_row(fields["pad_token_id"]) + 1
            rows = fields["max_positions"]
            fields["max_positions"] -= fields["position_offset"]
            if fields["max_positions"] < 1:
                raise ValueError(
                    "config.json: the position table must have rows after the padding token's, where positions begin, "
                    f"got pad_token_id {fields['pad_token_id']} and {rows} rows: correct pad_token_id or "
                    f"{self.config_names['max_positions']}"
                )
        if not self.has_token_types:
            fields["type_vocab_size"] = 0
        fields["pooler"] = self.has_pooler
        return fields

    def write(self, config: EncoderConfig) -> ConfigValues:
        """The values of config.json for the fields of EncoderConfig."""
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

    def new_extra(self, max_positions: int) -> ConfigValues:
        """The entries of a new model's config.json that are no fields of EncoderConfig."""
        return {}

    def padding_row(self, pad_token_id: int) -> int:
        """The position table's row for padding, if positions count from the row after it."""
        return pad_token_id

    # Description

    def stack(self, config: EncoderConfig) -> StackSpec:
        """The description of all layers."""
        numbers = range(config.num_layers)
        layers = tuple(self.layer(config, i) for i in numbers)
        return StackSpec(
            tuple(map(decoder_layer, layers)) if config.is_decoder else layers,
            tuple(self.module_of_layer(config, i) for i in numbers),
            tuple(self.rotary(config, i) for i in numbers),
            self.relative_bias(config),
            config.max_positions,
            self.relative_positions(config),
            self.convolution(config),
            self.residual_factor(config),
        )

    def layer(self, config: EncoderConfig, number: int) -> LayerSpec:
        """The description of layer ``number``, from 0."""
        head_dim = config.head_dim
        norm = NormSpec("layer", config.eps)
        return LayerSpec(
            AttentionSpec(config.num_heads, head_dim, head_dim**-0.5),
            FeedForwardSpec(config.intermediate_size, ACTIVATIONS[config.activation]),
            norm,
            norm,
        )

    def layer_lists(self, config: EncoderConfig) -> dict[str, list[Any]]:
        """The lists of one value for each layer that describe layers which differ: key in config.json → list. Values
        that follow from the layer's number are in them, written or not."""
        return {}

    def layer_dropout(self, config: EncoderConfig) -> LayerDropout:
        p = config.hidden_dropout_p
        return LayerDropout(config.attention_dropout_p, p, 0.0, p)

    def biases(self, config: EncoderConfig) -> Biases:
        return Biases()

    def rotary(self, config: EncoderConfig, number: int) -> RotarySpec | None:
        """The rotary angles of layer ``number``, or None."""
        return None

    def relative_bias(self, config: EncoderConfig) -> RelativeBiasSpec | None:
        """The buckets of the relative-position bias, or None without one."""
        return None

    def relative_biases(self, config: EncoderConfig) -> int:
        """The number of tables of relative biases: 0, 1 (shared by all layers), or one for each layer."""
        return 0 if self.relative_bias(config) is None else 1

    def relative_positions(self, config: EncoderConfig) -> RelativePositionSpec | None:
        """The table of relative positions that attention reads, or None."""
        return None

    def position_modules(self, config: EncoderConfig) -> PositionModules:
        """The modules for relative positions that a checkpoint has, whether attention reads them or not."""
        return PositionModules()

    def convolution(self, config: EncoderConfig) -> ConvolutionSpec | None:
        """The convolution after layer 0, or None."""
        return None

    def residual_factor(self, config: EncoderConfig) -> float:
        """The factor between the model's states and the layers' residual sums (:class:`StackSpec`)."""
        return 1.0

    def first_norm(self, config: EncoderConfig) -> bool:
        """Whether the stack of layers begins with a norm."""
        return False

    def embedding_norm(self, config: EncoderConfig) -> NormSpec | None:
        """The norm after the embeddings, or None."""
        return NormSpec("layer", config.eps)

    def position_table(self, config: EncoderConfig) -> bool:
        return True

    def fixed_positions(self, config: EncoderConfig) -> Tensor | None:
        """The values (rows, width) of a position table that is not trained; None: the table is trained."""
        return None

    def padding_idx(self, config: EncoderConfig) -> int | None:
        """The row of the word embeddings that gets no gradient, if a packed sequence can have its token."""
        return None

    def task_types(self, config: EncoderConfig) -> int:
        """The rows of the table of task types, of which every token has the first; 0: no table."""
        return 0

    def embedding_projection(self, config: EncoderConfig) -> bool:
        """Whether a linear layer follows the embeddings."""
        return config.embedding_size != config.hidden_size

    def projects_embeddings_first(self, config: EncoderConfig) -> bool:
        """Whether the projection comes before the embeddings' norm, and has no bias."""
        return False

    def embedding_scale(self, config: EncoderConfig) -> float:
        """Factor of the word embeddings."""
        return 1.0

    def drops_before_embedding_norm(self, config: EncoderConfig) -> bool:
        """Whether the embeddings' dropout comes before their norm."""
        return False

    def masked_embedding(self, config: EncoderConfig) -> int | None:
        """The token whose embedding is 0, and for whose share the others are scaled (:class:`EmbeddingSpec`)."""
        return None

    def embedding_dropout_p(self, config: EncoderConfig) -> float:
        return config.hidden_dropout_p

    def final_dropout_p(self, config: EncoderConfig) -> float:
        """The probability of dropout on the last layer's output."""
        return 0.0

    def output_projection(self, config: EncoderConfig) -> int | None:
        """The width of the encoder's output, which a linear layer makes after the last norm; None without it."""
        return None

    def kept_linears(self, config: EncoderConfig) -> dict[str, tuple[int, int]]:
        """Name → (inputs, outputs) of linear layers that checkpoints have, and that the encoder only keeps."""
        return {}

    def constant_values(self, config: EncoderConfig) -> dict[str, Tensor]:
        """Name → values of a checkpoint's tensors that are no weights: those of ``constants``, and tables that follow
        from the configuration."""
        return {}

    def live_pooled(self, model: Any, hidden: Tensor) -> Tensor:
        """The result of a live base model's pooler for hidden states (batch, length, hidden_size)."""
        return model.pooler(hidden)

    def live_changes(self, model: Any) -> ConfigValues:
        """Values of a live model's configuration that its forward changes in the model, as they are there now."""
        return {}

    def follow_live(self, model: Any, length: int) -> None:
        """Change a live model as its own forward does in a call with a padded batch of this length."""

    def head(self, config: EncoderConfig, spec: HeadSpec) -> HeadSpec:
        """A head with the values that the configuration sets."""
        return spec

    def decoder_width(self, config: EncoderConfig) -> int:
        """The width of the input of the masked-LM head's decoder."""
        return config.embedding_size

    def decoder_bias(self, config: EncoderConfig) -> bool:
        """Whether the masked-LM head has a bias for each token of the vocabulary."""
        return True

    def separator(self, config: EncoderConfig) -> int:
        """The token between the two texts of a pair, for families that tell a question from its context by it."""
        raise NotImplementedError

    def classifier_pooling(self, config: EncoderConfig) -> str:
        """The pooling for the classification head if there is no pooler: "cls", "mean", "last" or "late".

        "last" is the last token that is not padding (:func:`fastenc.packing.last_tokens`). "late" is the mean of what
        the head's dense layer makes of each token.
        """
        return "cls"

    def token_classifier_dropout_p(self, config: EncoderConfig) -> float:
        p = config.classifier_dropout_p
        return config.hidden_dropout_p if p is None else p

    def question_answerer_dropout_p(self, config: EncoderConfig) -> float:
        return config.hidden_dropout_p

    def question_end(self, config: EncoderConfig) -> int | None:
        """The id of the token that ends a question whose tokens cannot be the answer; None: they can be."""
        return None

    def module_of_layer(self, config: EncoderConfig, number: int) -> int:
        """The index of the module that computes layer ``number``; layers with shared weights have the same module."""
        return number

    def layer_modules(self, config: EncoderConfig) -> int:
        """The number of modules that compute layers. A checkpoint may have some that no layer uses."""
        return config.num_layers

    # First weights

    def initial_stds(self, config: EncoderConfig, name: str) -> tuple[float, ...]:
        """The standard deviations of a weight's initial values; ``name`` is its module's path ("layers.0.qkv", "out").

        One for all of the weight, or one for each of the tensors that a checkpoint has in its place, in their order.
        """
        return (config.initializer_range,)

    def initial_zero_row(self, config: EncoderConfig, name: str) -> int | None:
        """The row of an embedding table that begins as 0, or None; ``name`` as in :meth:`initial_stds`."""
        return None

    def initial_norm(self, config: EncoderConfig) -> float:
        """The initial weight of a norm."""
        return 1.0

    def initial_cutoff(self, config: EncoderConfig) -> float | None:
        """The number of standard deviations at which initial values are truncated; None: they are not."""
        return None

    # Names

    def prefix_of(self, head: str) -> str:
        """What the encoder's names begin with in a checkpoint with this head; "": nothing."""
        prefix = self.head_prefixes.get(head, self.prefix)
        return f"{prefix}." if prefix else ""

    # The path under which a checkpoint's layers are numbered; None if these are not our layers.
    layers_path: ClassVar[str | None] = None

    def names(self, config: EncoderConfig) -> Names:
        """Name of a module of our encoder → its name in the checkpoint."""
        raise NotImplementedError

    def dropout_names(self, config: EncoderConfig) -> dict[str, str]:
        """Our name of a dropout ("embeddings", "final", "layers.0.down") → path of the module in a live model.

        A dropout that is not named here has the configuration's probability.
        """
        return {}

    def renamed(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A checkpoint's tensor by transformers' current names.

        Args: name: its name in the file, without the prefix.
        Returns: usually one entry; several if the file stacks weights, none if the encoder does not read the tensor.
        """
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        return {name.replace("LayerNorm.beta", "LayerNorm.bias"): tensor}

    def export_state_dict(
        self, tensors: dict[str, Tensor], config: EncoderConfig
    ) -> dict[str, Tensor]:
        """The tensors of a checkpoint by the names that transformers writes, from those by :meth:`names`."""
        return tensors

    # Adaptations for tasks

    def tasks(self, config: EncoderConfig) -> dict[str, str]:
        """Task for which a checkpoint has a LoRA → the instruction that it puts before each text."""
        return {}

    def lora_of_tasks(self, config: EncoderConfig) -> ConfigValues:
        """``rank``, ``alpha`` and ``dropout_p`` of the LoRA of :meth:`tasks`."""
        raise NotImplementedError

    def take_lora(
        self, config: EncoderConfig, tensors: dict[str, Tensor]
    ) -> dict[str, dict[str, Tensor]]:
        """Take the matrices of :meth:`tasks` out of a checkpoint's ``tensors``.

        Returns: task → its matrices by PEFT's names without its prefixes; empty if ``tensors`` has none.
        """
        return {}

    # Encoder-decoders

    def decoder_sizes(self, config: EncoderConfig) -> ConfigValues:
        """The fields in which a decoder's configuration differs from its encoder's."""
        return {}

    def decoder_start(self, config: EncoderConfig) -> int | None:
        """The first token of the decoder's input, or None if it depends on the target's language."""
        return config.extra.get("decoder_start_token_id")

    def output_scale(self, config: EncoderConfig) -> float:
        """Factor of the decoder's states before the projection to the vocabulary."""
        return 1.0

    def has_logits_bias(self, config: EncoderConfig) -> bool:
        """Whether a bias that is not trained is added to the logits."""
        return False

    def name_in_whole(self, config: EncoderConfig, name: str) -> str:
        """A name of :meth:`names` → the name in an encoder-decoder's checkpoint, without ``whole_prefix``."""
        return name

    def stacked_rows(self, config: EncoderConfig, module: str, rows: int, count: int) -> list[int]:
        """How the ``rows`` of our module's weight are divided among ``count`` layers of a checkpoint."""
        of_layer = QKV.search(module)
        if of_layer and count == 3:
            heads = self.layer(config, int(of_layer[1])).attention.heads
            return [rows // sum(heads) * each for each in heads]
        return [rows // count] * count

    def lora_targets(self, config: EncoderConfig) -> dict[str, tuple[str, ...]]:
        """Our linear layer → LoRA targets, the layers of the checkpoint that are stacked in it, in their order."""
        names = self.names(config)
        first = {name: names[f"layers.0.{name}"] for name in ("qkv", "up")}
        several = {"qkv": ("query", "key", "value"), "up": ("gate", "up")}
        return {
            "qkv": several["qkv"] if isinstance(first["qkv"], tuple) else ("qkv",),
            "attention_out": ("attention_out",),
            "up": several["up"] if isinstance(first["up"], tuple) else ("up",),
            "down": ("down",),
        }


def decoder_layer(spec: LayerSpec) -> LayerSpec:
    """The layer with causal self-attention, and with a sublayer that attends to the encoder's states."""
    return replace(
        spec, attention=replace(spec.attention, window=(-1, 0)), cross_norm=spec.attention_norm
    )
