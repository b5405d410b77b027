"""Embeddings and layers as modules, which encoders and decoders have in common."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastenc.models.architectures.modules import Biases
from fastenc.models.config import EncoderConfig
from fastenc.models.layer_vectors import LayerVectors, VectorSublayer
from fastenc.nn.adaptation import LayerAdaptation, used_name
from fastenc.nn.convolution import Convolution
from fastenc.nn.embedding_table import EmbeddingTable
from fastenc.nn.embeddings import Embeddings, make_norm
from fastenc.nn.evaluation_mode import trains
from fastenc.nn.frozen_layers import FrozenLayers
from fastenc.nn.frozen_weights import FrozenWeights, int8_reasons
from fastenc.nn.layer_call import NOT_PREPARED, LayerCall, Prepared
from fastenc.nn.layer_dropout import NO_DROPOUT, LayerDropout
from fastenc.nn.layer_inputs import AttentionInputs, LayerState
from fastenc.nn.layer_spec import AttentionSpec, LayerSpec, NormSpec
from fastenc.nn.layer_weights import (
    OWN_NORMS,
    CrossWeights,
    GlobalWeights,
    LayerWeights,
    norm_factor,
    own_norm_factors,
    parameters_of,
)
from fastenc.nn.pooling import project
from fastenc.nn.relative_positions import position_rows, position_table
from fastenc.nn.stack import StackModules, ways_of_layers
from fastenc.nn.ways import run_layer


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

    def __init__(
        self, config: EncoderConfig, spec: LayerSpec, biases: Biases, is_last: bool = False
    ):
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
        out_norm_bias = biases.norm and (biases.last_norm or not is_last)
        self.out_norm = make_norm(spec.out_norm, width, out_norm_bias)
        # Norms that only some families have: of queries and keys, and of the sublayers' outputs.
        self.query_norm, self.key_norm = _head_norms(attention, spec.out_norm)
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
        self.vectors = VectorSublayer(width, spec) if spec.layer_vector_size else None
        self.train_dropout = config.architecture.layer_dropout(config)
        # Name → modules that fastenc.adapt has added; at most one name is in use.
        self.adaptations = nn.ModuleDict()
        self.adaptation: str | None = None

    def weights(self) -> LayerWeights:
        # Every call asks, and nn.Module.__getattr__ is slow.
        modules: dict[str, Any] = self._modules
        attention_out, attention_norm = modules["attention_out"], modules["attention_norm"]
        qkv, up, down, out_norm = (modules[name] for name in ("qkv", "up", "down", "out_norm"))
        cross, of_globals = modules.get("cross"), modules.get("global_qkv")
        vectors = modules.get("vectors")
        qkv_bias, spec = qkv.bias, self._spec
        if self.query_bias is not None and self.value_bias is not None:
            qkv_bias = spec.attention.bias_without_key(self.query_bias, self.value_bias)
        return LayerWeights(
            (qkv.weight,),
            (qkv_bias,),
            attention_out.weight,
            attention_out.bias,
            norm_factor(attention_norm.weight, spec.attention_norm),
            getattr(attention_norm, "bias", None),
            (up.weight,),
            (up.bias,),
            down.weight,
            down.bias,
            norm_factor(out_norm.weight, spec.out_norm),
            getattr(out_norm, "bias", None),
            *parameters_of(modules.get("position_key")),
            *parameters_of(modules.get("position_query")),
            *own_norm_factors(map(modules.get, OWN_NORMS), spec.out_norm),
            cross=None if cross is None else cross.weights(),
            global_qkv=None
            if of_globals is None
            else GlobalWeights((of_globals.weight,), (of_globals.bias,)),
            layer_vectors=None if vectors is None else vectors.weights(),
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


def _head_norms(spec: AttentionSpec, like: NormSpec) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms of queries and of keys, with the factor of the norms ``like``; None without them."""
    if spec.head_norm_eps is None:
        return None, None
    together = spec.normalises_heads_together
    norm = replace(like, norm_type="layer" if together else "rms", eps=spec.head_norm_eps)
    query_heads, key_heads, _ = spec.heads if together else (1, 1, 1)
    make = lambda heads: make_norm(norm, heads * spec.head_dim, False)
    return make(query_heads), make(key_heads)


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
            padding_idx=architecture.padding_idx(config),
            positions=rows if architecture.position_table(config) else 0,
            fixed_positions=architecture.fixed_positions(config),
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
        modules = architecture.layer_modules(config)
        self.layers = nn.ModuleList(
            EncoderLayer(config, self.stack.of_module(i), biases, is_last=i == modules - 1)
            for i in range(modules)
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
        sizes = [layer.layer_vector_size for layer in self.stack.layers]
        self.layer_vectors = LayerVectors(width, sizes, norm) if sizes[0] else None
        output_size = architecture.output_projection(config)
        self.output_projection = (
            None if output_size is None else nn.Linear(width, output_size, bias=False)
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
            None if self.layer_vectors is None else self.layer_vectors.weights(),
        )

    def project_output(self, states: Tensor) -> Tensor:
        """States (rows, hidden_size) of the last layer, or vectors pooled from them, as the family's last linear layer
        makes them: (rows, output_size). Without such a layer they stay as they are."""
        projection = self.output_projection
        return states if projection is None else project(states, projection)

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
