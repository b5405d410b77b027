"""The encoder: embeddings and layers over packed tokens."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc._base.json_values import JsonObject
from fastenc.models.adapters.adaptation_state import AdaptationState
from fastenc.models.adapters.adaptations import name_of_task
from fastenc.models.adapters.adapter_checkpoint import read_tasks, write_tasks
from fastenc.models.architectures.base import Biases
from fastenc.models.config import EncoderConfig
from fastenc.models.embedding.encode import encode as encode_texts
from fastenc.models.embedding.sentence_files import SentenceSettings, read_settings, write_settings
from fastenc.models.embedding.splade_files import is_splade
from fastenc.models.embedding.word_vectors import embed_words as embed_sentences
from fastenc.models.pretrained import PretrainedModel
from fastenc.nn.adaptation import LayerAdaptation, used_name
from fastenc.nn.convolution import Convolution
from fastenc.nn.embedding_table import EmbeddingTable
from fastenc.nn.embeddings import Embeddings, make_norm
from fastenc.nn.evaluation_mode import trains
from fastenc.nn.frozen_layers import FrozenLayers
from fastenc.nn.frozen_weights import FrozenWeights, int8_reasons
from fastenc.nn.layer_call import NOT_PREPARED, LayerCall, Prepared
from fastenc.nn.layer_spec import (
    NO_DROPOUT,
    AttentionInputs,
    CrossWeights,
    GlobalWeights,
    LayerDropout,
    LayerSpec,
    LayerState,
    LayerWeights,
    NormSpec,
    OwnNormFactors,
    norm_factor,
)
from fastenc.nn.pooling import LAST_LAYERS, pool, pool_layers, project
from fastenc.nn.prepend import prepend_rows
from fastenc.nn.relative_positions import position_rows, position_table
from fastenc.nn.scalar_mix import ScalarMix, add_weighted
from fastenc.nn.stack import StackModules, VisitInput, run_stack, ways_of_layers
from fastenc.nn.ways import run_layer
from fastenc.packing import PackedBatch, check_cu_seqlens

# Called with a state's number (0 for the embeddings' output) and the state, which it must not change.
Visit = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class EncoderOutput:
    """The results of an encoder in packed layout. ``fastenc.ops.unpack`` restores the padding.

    Fields:
        last_hidden_state: (total_tokens, hidden_size). For an encoder with ``mix``, the mix of all states.
        hidden_states: if requested, the embeddings' output and every layer's output, each (total_tokens, hidden_size)
            or None if this state was not requested.
        pooled: (batch, hidden_size), the pooler's output, or None without a pooler.
        tied_weight: if requested, the word embeddings' weight (vocab_size, embedding_size) for a tied decoder; see
            :func:`fastenc.ops.tied_embedding_layer_norm`.
    """

    last_hidden_state: Tensor
    hidden_states: tuple[Tensor | None, ...] | None = None
    pooled: Tensor | None = None
    tied_weight: Tensor | None = None


class CrossAttention(nn.Module):
    """The weights of the sublayer that attends to the encoder's states. ``key_value`` computes k and v."""

    def __init__(self, config: EncoderConfig, spec: LayerSpec, biases: Biases):
        super().__init__()
        assert spec.cross_norm is not None  # only such layers have the sublayer
        width, heads_width = config.hidden_size, spec.attention.num_heads * spec.attention.head_dim
        self.query = nn.Linear(width, heads_width, bias=biases.qkv)
        self.key_value = nn.Linear(width, 2 * heads_width, bias=biases.qkv)
        self.out = nn.Linear(heads_width, width, bias=biases.attention_out)
        self.norm = make_norm(spec.cross_norm, width, biases.norm)

    def weights(self) -> CrossWeights:
        return CrossWeights(
            self.query.weight,
            self.query.bias,
            (self.key_value.weight,),
            (self.key_value.bias,),
            self.out.weight,
            self.out.bias,
            self.norm.weight,
            getattr(self.norm, "bias", None),
        )


class EncoderLayer(nn.Module):
    """One layer of an encoder or a decoder: its weights and adaptations.

    ``qkv`` computes q, k and v; ``up`` computes both halves of a GLU.
    """

    def __init__(self, config: EncoderConfig, spec: LayerSpec, biases: Biases):
        super().__init__()
        width, attention, inner = config.hidden_size, spec.attention, spec.feed_forward
        heads_width = attention.num_heads * attention.head_dim
        inner_rows = inner.intermediate_size * (2 if inner.gated else 1)
        qkv_width = sum(attention.heads) * attention.head_dim
        self.qkv = nn.Linear(width, qkv_width, bias=biases.qkv and biases.key)
        new_bias = lambda: (
            nn.Parameter(torch.zeros(heads_width)) if biases.qkv and not biases.key else None
        )
        self.query_bias, self.value_bias = new_bias(), new_bias()
        self._spec = spec
        self.attention_out = nn.Linear(heads_width, width, bias=biases.attention_out)
        self.attention_norm = make_norm(spec.attention_norm, width, biases.norm)
        self.up = nn.Linear(width, inner_rows, bias=biases.up)
        self.down = nn.Linear(inner.intermediate_size, width, bias=biases.down)
        self.out_norm = make_norm(spec.out_norm, width, biases.norm)
        # Norms that only some families have: of each head's queries and keys, and of the sublayers' outputs.
        of_heads = (
            None
            if attention.head_norm_eps is None
            else replace(spec.out_norm, norm_type="rms", eps=attention.head_norm_eps)
        )
        self.query_norm, self.key_norm = (
            None if of_heads is None else make_norm(of_heads, attention.head_dim, False)
            for _ in range(2)
        )
        self.attention_own_norm, self.down_own_norm = (
            make_norm(norm, width, False) if spec.own_norms else None
            for norm in (spec.attention_norm, spec.out_norm)
        )
        own = config.architecture.position_modules(config).own_projections
        project = lambda term, bias: (
            nn.Linear(width, heads_width, bias=bias) if term in own else None
        )
        self.position_key = project("c2p", biases.qkv and biases.key)
        self.position_query = project("p2c", biases.qkv)
        self.global_qkv = (
            nn.Linear(width, 3 * heads_width, bias=biases.qkv)
            if attention.global_attention
            else None
        )
        self.cross = None if spec.cross_norm is None else CrossAttention(config, spec, biases)
        self.train_dropout = config.architecture.layer_dropout(config)
        # Name → modules that fastenc.adapt has added; at most one name is in use.
        self.adaptations = nn.ModuleDict()
        self.adaptation: str | None = None

    def weights(self) -> LayerWeights:
        # Every call asks, and nn.Module.__getattr__ is slow.
        modules: dict[str, Any] = self._modules
        attention_out, attention_norm = modules["attention_out"], modules["attention_norm"]
        qkv, up, down, out_norm = (modules[name] for name in ("qkv", "up", "down", "out_norm"))
        position_key, position_query = modules.get("position_key"), modules.get("position_query")
        cross, of_globals = modules.get("cross"), modules.get("global_qkv")
        qkv_bias: Tensor | None = qkv.bias
        if self.query_bias is not None and self.value_bias is not None:
            attention = self._spec.attention
            qkv_bias = attention.bias_without_key(self.query_bias, self.value_bias)
        norms = self._spec.attention_norm, self._spec.out_norm
        return LayerWeights(
            (qkv.weight,),
            (qkv_bias,),
            attention_out.weight,
            attention_out.bias,
            norm_factor(attention_norm.weight, norms[0]),
            getattr(attention_norm, "bias", None),
            (up.weight,),
            (up.bias,),
            down.weight,
            down.bias,
            norm_factor(out_norm.weight, norms[1]),
            getattr(out_norm, "bias", None),
            *_parameters(position_key),
            *_parameters(position_query),
            *_own_norm_factors(modules, norms),
            cross=None if cross is None else cross.weights(),
            global_qkv=None
            if of_globals is None
            else GlobalWeights((of_globals.weight,), (of_globals.bias,)),
        )

    def dropout(self) -> LayerDropout:
        return self.train_dropout if trains(self) else NO_DROPOUT

    def draws_blocks(self) -> bool:
        return trains(self)

    def adapted(self) -> LayerAdaptation | None:
        """The modules of the adaptation in use, or None."""
        name = used_name(self.adaptation)
        if name is None:
            return None
        added = self.adaptations[name]
        assert isinstance(added, LayerAdaptation)
        return added

    def forward(
        self,
        state: LayerState,
        inputs: AttentionInputs,
        spec: LayerSpec,
        dropout: LayerDropout,
        prepared: Prepared = NOT_PREPARED,
    ) -> LayerState:
        weights = self.weights() if prepared.weights is None else prepared.weights
        return run_layer(LayerCall(state, inputs, weights, spec, dropout, self.adapted(), prepared))


class LayerStack(nn.Module):
    """Embeddings and layers: what encoders and decoders have in common."""

    config: EncoderConfig

    def make_stack(self, config: EncoderConfig) -> None:
        """Make the modules that ``config`` describes."""
        architecture, width = config.architecture, config.hidden_size
        self.stack = architecture.stack(config)
        biases = architecture.biases(config)
        rows = config.max_positions + config.position_offset
        self.embeddings = Embeddings(
            config.vocab_size,
            config.embedding_size,
            width,
            positions=rows if architecture.position_table(config) else 0,
            position_offset=config.position_offset,
            token_types=config.type_vocab_size,
            task_types=architecture.task_types(config),
            norm=architecture.embedding_norm(config),
            norm_bias=biases.embedding_norm,
            scale=architecture.embedding_scale(config),
            masked=architecture.masked_embedding(config),
            dropout_p=architecture.embedding_dropout_p(config),
            projection=architecture.embedding_projection(config),
            project_first=architecture.projects_embeddings_first(config),
            drop_first=architecture.drops_before_embedding_norm(config),
        )
        norm = self.stack.layers[0].out_norm
        self.first_norm = (
            make_norm(norm, width, biases.norm) if architecture.first_norm(config) else None
        )
        self.layers = nn.ModuleList(
            EncoderLayer(config, self.stack.of_module(i), biases)
            for i in range(architecture.layer_modules(config))
        )
        tables = architecture.relative_biases(config)
        buckets = 0 if self.stack.relative_bias is None else self.stack.relative_bias.num_buckets
        self.relative_biases = nn.ModuleList(
            EmbeddingTable(buckets, config.num_heads) for _ in range(tables)
        )
        positions, convolution = architecture.position_modules(config), self.stack.convolution
        self.relative_positions = EmbeddingTable(positions.rows, width) if positions.rows else None
        self.position_norm = (
            make_norm(NormSpec("layer", config.eps), width, True) if positions.norm else None
        )
        self.convolution = (
            None
            if convolution is None
            else Convolution(convolution, width, config.hidden_dropout_p)
        )
        self.kept = nn.ModuleDict(
            {name: nn.Linear(*size) for name, size in architecture.kept_linears(config).items()}
        )
        self.final_dropout_p = architecture.final_dropout_p(config)
        self.gradient_checkpointing = False
        self.frozen = FrozenWeights()

    def _stack_modules(self, frozen: FrozenLayers | None = None) -> StackModules:
        norm, modules = self.first_norm, self._modules_of_layers()
        recomputes = self.gradient_checkpointing and self.training
        return StackModules(
            modules,
            None if norm is None else (norm.weight, getattr(norm, "bias", None)),
            [*self.relative_biases.parameters()],
            self.final_dropout_p if trains(self) else 0.0,
            [recomputes] * len(modules),
            frozen,
            position_table(self.relative_positions, self.position_norm),
            None if self.convolution is None else self.convolution.weights(),
        )

    def layer_ways(self, tokens: int = 512) -> list[Mapping[str, str | None]]:
        """For each layer {way of running it: why a call now cannot take it, or None}.

        See :func:`fastenc.nn.stack.ways_of_layers`.
        """
        return ways_of_layers(self.config.hidden_size, tokens, self.stack, self._stack_modules())

    def layer_weights(self) -> list[tuple[LayerWeights, LayerSpec]]:
        """(weights, description) of every module of ``layers``.

        Raises: ValueError if the model was loaded with ``dtype="int8"``.
        """
        self.frozen.require_weights("this call")
        return [
            (layer.weights(), self.stack.of_module(i))
            for i, layer in enumerate(self._modules_of_layers())
        ]

    def position_rows(self) -> Tensor | None:
        """The rows of the table of relative positions after its norm, or None if no layer reads it."""
        table = position_table(self.relative_positions, self.position_norm)
        spec = self.stack.relative_positions
        return None if table is None or spec is None else position_rows(table, spec)

    def layer_adaptations(self) -> list[LayerAdaptation | None]:
        """What is added to every module of ``layers``, or None."""
        return [layer.adapted() for layer in self._modules_of_layers()]

    def int8_reasons(self) -> list[str | None]:
        """For every module of ``layers`` why ``fastenc.freeze(model, dtype="int8")`` cannot take it, or None."""
        return int8_reasons(self)

    def _modules_of_layers(self) -> list[EncoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, EncoderLayer)]


class Encoder(LayerStack, PretrainedModel):
    """A bidirectional encoder on packed batches, of any architecture of ``fastenc.models.architectures``.

        x_0 = Embeddings(tokens),  x_i = Layer_i(x_{i-1})

    ``Encoder(config)`` has random weights; :meth:`from_pretrained` loads a checkpoint.

    Attributes:
        sentence: how a text's vector is computed, if the checkpoint has sentence-transformers' files; saved with the
            model.
        sparse: whether the checkpoint is that of a sparse encoder, whose vectors :class:`fastenc.SparseEncoder`
            computes. :meth:`encode` then needs a pooling.
        gradient_checkpointing: set it to True to keep only the input of each layer in training; the backward computes
            the rest again.
        adapted: the state of :mod:`fastenc.adapt`.
        mix: with ``config.layer_mix``, a learned weighted sum of x_0 to x_L, which heads, pooler and pooling read
            instead of x_L.
    """

    architecture = "Model"
    optional_parts = ("pooler", "mix", "kept")
    keeps_tasks = True
    sparse: bool = False

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.make_stack(config)
        width = config.hidden_size
        self.pooler = nn.Linear(width, width) if config.pooler else None
        self.mix = ScalarMix(config.num_layers + 1) if config.layer_mix else None
        self.adapted = AdaptationState()
        self.sentence: SentenceSettings | None = None
        self.init_modules(self)

    def forward(
        self,
        batch: PackedBatch,
        output_hidden_states: bool | Sequence[int] = False,
        tied_weight: bool = False,
        visit: Visit | None = None,
        visit_input: VisitInput | None = None,
        pooled: bool = True,
    ) -> EncoderOutput:
        """Encode a packed batch.

        Args:
            output_hidden_states: True returns all states, a sequence those of these numbers: 0 is the embeddings'
                output, i the output of layer i, negative numbers count from the last.
            tied_weight: return the word embeddings' weight for a tied decoder.
            visit: called with each state as soon as it is computed; the encoder does not keep the state.
            visit_input: called before each layer with the inputs of its attention, including the rows of a prompt.
            pooled: False leaves out the pooler, for a caller that does not read it.
        Raises: ValueError for an argument that is not a PackedBatch, token ids outside the vocabulary, sequences longer
            than the model's positions, or states that do not exist.
        """
        if not isinstance(batch, PackedBatch):
            raise ValueError(
                f"the encoder takes a PackedBatch, got {type(batch).__name__}: encode() takes texts, and "
                "fastenc.packing.pack makes a batch of padded ids"
            )
        wanted = wanted_states(output_hidden_states, self.config.num_layers)
        if batch.hidden is not None:
            if wanted or tied_weight or visit is not None or visit_input is not None:
                raise ValueError(
                    "a batch with hidden, the encoder's output, has no other states: leave out hidden, so that they "
                    "are computed"
                )
            return EncoderOutput(
                batch.hidden, pooled=self._pooled(batch.hidden, batch) if pooled else None
            )
        self._check_length(batch)
        if not torch.compiler.is_compiling():
            check_cu_seqlens(batch.cu_seqlens, batch.total_tokens, batch.max_seqlen)
        parts = self.adapted.parts_in_use()
        x, table = self.embeddings(batch, tied_weight, self.adapted.first_position, parts)
        cu_seqlens, max_seqlen, rows = batch.cu_seqlens, batch.max_seqlen, None
        prompt, global_tokens = self.adapted.prompt(), batch.global_tokens
        if prompt is not None:
            x, cu_seqlens, rows = prepend_rows(x, cu_seqlens, prompt)
            max_seqlen += prompt.shape[0]
            global_tokens = None if global_tokens is None else rows[global_tokens]
        without_prompt = lambda state: state if rows is None else state[rows]
        kept: list[Tensor | None] = [None] * (self.config.num_layers + 1)
        weights = None if self.mix is None else self.mix.weights.unbind()
        weighted_sum: Tensor | None = None
        modules = self._stack_modules(self.frozen.current())
        states = run_stack(
            x, cu_seqlens, max_seqlen, self.stack, modules, visit_input, global_tokens=global_tokens
        )
        for number, state in enumerate(states):
            if number in wanted:
                kept[number] = without_prompt(state)
            if visit is not None:
                visit(number, without_prompt(state))
            if weights is not None:
                weighted_sum = add_weighted(weighted_sum, weights[number], without_prompt(state))
        last = without_prompt(state) if weighted_sum is None else weighted_sum
        return EncoderOutput(
            last,
            tuple(kept) if wanted else None,
            self._pooled(last, batch) if pooled else None,
            table,
        )

    def _check_length(self, batch: PackedBatch) -> None:
        positions, taken = self.config.max_positions, self.adapted.first_position
        room = positions - taken
        bounded = self.embeddings.position is not None or self.stack.has_bounded_angles
        if bounded and batch.max_seqlen > room:
            prefix = f"{positions} positions less its prefix's {taken}"
            raise ValueError(
                f"a sequence may have at most {room} tokens, the model's {prefix if taken else 'positions'}, "
                f"got {batch.max_seqlen}: cut it or split it"
            )

    def _pooled(self, x: Tensor, batch: PackedBatch) -> Tensor | None:
        if self.pooler is None or not batch.num_sequences:
            return None
        first, parts = pool(x, batch.cu_seqlens, "cls"), self.adapted.parts_in_use()
        pooled = project(first, self.pooler)
        return torch.tanh(pooled + parts["pooler"](first) if "pooler" in parts else pooled)

    def pooled_vectors(self, batch: PackedBatch, pooling: str) -> Tensor:
        """One vector per sequence, (batch, hidden_size), by :func:`fastenc.nn.pooling.pool_layers`.

        Then they are standardized, or multiplied by the weights of linear layers, if the checkpoint says so.
        """
        last_four = range(-LAST_LAYERS, 0) if pooling == "last-four" else False
        output = self(batch, output_hidden_states=last_four, pooled=False)
        states = output.hidden_states or (output.last_hidden_state,)
        vectors = pool_layers(states, batch.cu_seqlens, pooling)
        return vectors if self.sentence is None else self.sentence.after_pooling(vectors)

    @property
    def max_tokens(self) -> int:
        """The number of tokens to which texts are cut: the checkpoint's max_length, at most the model's positions.

        It can be set, and is saved with the model as a setting of sentence-transformers. Raises: ValueError below 1 and
        beyond the positions.
        """
        declared = self.sentence.max_length if self.sentence else None
        return min(declared or self.positions, self.positions)

    @max_tokens.setter
    def max_tokens(self, number: int) -> None:
        if not 1 <= number <= self.positions:
            raise ValueError(
                f"max_tokens must be from 1 to the model's {self.positions} positions, got {number}"
            )
        self.sentence = replace(self.sentence or SentenceSettings(), max_length=number)

    def adaptation_of_task(self, task: str) -> tuple[str, str]:
        """The name of the adaptation for a task of the checkpoint, and the instruction that is put before each text.

        Raises: ValueError for a task that the checkpoint does not have, and for layers that take no adaptation now.
        """
        tasks = self.config.architecture.tasks(self.config) if self.adapted.tasks else {}
        if task not in tasks:
            raise ValueError(
                f"task must be one of the checkpoint's tasks, got {task!r}; it has {', '.join(tasks) or 'none'}: leave "
                "out task"
            )
        self.frozen.require_weights("the LoRA of a task")
        if self.frozen.in_8_bits:
            raise ValueError(
                "the LoRA of a task is not computed in int8, got a frozen model: call fastenc.unfreeze(model)"
            )
        if self.adapted.unmerged_weights:
            raise ValueError("an adaptation is merged into the weights: unmerge it first")
        return name_of_task(task), tasks[task]

    def read_beside(self, folder: Path) -> None:
        if not self.adapted.tasks:
            read_tasks(folder, self)
        try:
            self.sparse = is_splade(folder)
            self.sentence = None if self.sparse else read_settings(folder, self.config)
        except (
            ValueError
        ) as error:  # not an error, because training the encoder does not need these files
            warnings.warn(f"{error}; encode() without a pooling takes the mean", stacklevel=4)

    def write_beside(self, folder: Path) -> None:
        write_tasks(folder, self)
        if self.sentence is not None:
            write_settings(folder, self.sentence, self.config, self.mix)

    def extra_config(self) -> JsonObject:
        values: JsonObject = {}
        if self.config.architecture.tasks(self.config) and not self.adapted.tasks:
            values["load_trained_adapters"] = False
        if self.sentence is None:
            return values
        several = self.mix is not None or self.sentence.pooling == "last-four"
        return {**values, "output_hidden_states": True} if several else values

    @staticmethod
    def similarity(a: object, b: object) -> Tensor:
        """Cosine similarities of the rows of a and of b, float32 (rows of a, rows of b).

        Args: a, b: tensors or arrays, (rows, width) or (width,).
        Raises: ValueError for other values, and for vectors of different widths.
        """
        x, y = (F.normalize(_as_vectors(each), dim=1) for each in (a, b))
        if x.shape[1] != y.shape[1]:
            raise ValueError(
                f"similarity takes vectors of one width, got {x.shape[1]} and {y.shape[1]}: encode both with one model"
            )
        return x @ y.T

    # Methods with the functions' options and descriptions.
    encode = encode_texts
    embed_words = embed_sentences


def encoder_under_head(config: EncoderConfig, reads_pooler: bool) -> Encoder:
    """The encoder of a model with a head, with the pooler of transformers' class.

    A pooler that the head does not read is loaded and saved, but not trained.
    """
    has_unread = config.architecture.has_unread_pooler and not reads_pooler
    encoder = Encoder(config.replace(pooler=reads_pooler or has_unread))
    if has_unread and encoder.pooler is not None:
        encoder.pooler.requires_grad_(False)
    return encoder


def _own_norm_factors(
    modules: Mapping[str, Any], norms: tuple[NormSpec, NormSpec]
) -> OwnNormFactors:
    """The factors of the norms that only some families have, None for a missing one."""

    def factor(name: str, spec: NormSpec) -> Tensor | None:
        module = modules.get(name)
        return None if module is None else norm_factor(module.weight, spec)

    return (
        factor("query_norm", norms[1]),
        factor("key_norm", norms[1]),
        factor("attention_own_norm", norms[0]),
        factor("down_own_norm", norms[1]),
    )


def _parameters(module: nn.Linear | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if module is None else (module.weight, module.bias)


def _as_vectors(given: object) -> Tensor:
    try:
        return torch.atleast_2d(torch.as_tensor(given)).float()
    except (TypeError, ValueError):
        raise ValueError(
            f"similarity takes vectors, tensors or arrays, got {given!r:.40}: encode texts first"
        ) from None


def wanted_states(asked: bool | Sequence[int], num_layers: int) -> frozenset[int]:
    """The numbers, from 0, of the requested states. Raises: ValueError for a state that does not exist."""
    if isinstance(asked, bool):
        return frozenset(range(num_layers + 1) if asked else ())
    outside = [number for number in asked if not -num_layers - 1 <= number <= num_layers]
    if outside:
        raise ValueError(
            f"output_hidden_states must be of the states 0 to {num_layers}, got {outside[0]}: the model has "
            f"{num_layers} layers"
        )
    return frozenset(number % (num_layers + 1) for number in asked)
