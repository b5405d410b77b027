"""The stack of layers: its description, and the one loop that runs it for our encoders and for patched models."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastenc.nn.adaptation import LayerAdaptation
from fastenc.nn.block_plan import block_plan, draw_random_blocks
from fastenc.nn.cast_weights import cast_weights
from fastenc.nn.convolution import ConvolutionSpec, ConvolutionWeights, convolve
from fastenc.nn.decoder_step import decode_tokens
from fastenc.nn.frozen_layers import FrozenLayers, FrozenStack, frozen_stack
from fastenc.nn.layer import start
from fastenc.nn.layer_cache import LayerCache
from fastenc.nn.layer_call import NOT_PREPARED, LayerCall, Prepared
from fastenc.nn.layer_dropout import LayerDropout, with_rng_states
from fastenc.nn.layer_inputs import AttentionInputs, LayerState, Source
from fastenc.nn.layer_spec import AttentionSpec, LayerSpec
from fastenc.nn.layer_vectors import LayerVectorTable, layer_vectors
from fastenc.nn.layer_weights import LayerWeights
from fastenc.nn.relative_bias import RelativeBiasSpec, layer_biases
from fastenc.nn.relative_positions import PositionTable, RelativePositionSpec, relative_positions
from fastenc.nn.rotary import RotarySpec, rotary_table, table_rows
from fastenc.nn.ways import unsupported_reasons
from fastenc.ops.attention import sequence_bounds
from fastenc.ops.attention_blocks import attention_blocks
from fastenc.ops.block_sparse_attention import BlockPlan

# Called with a layer's number (from 0), the input x of its attention, and the other inputs of its attention.
VisitInput = Callable[[int, Tensor, AttentionInputs], None]


@dataclass(frozen=True)
class StackSpec:
    """The layers of an encoder, and what they share.

    Fields:
        layers: the description of each layer.
        module_of_layer: for each layer the index of the module that computes it; layers with shared weights have the
            same module.
        rotary: the rotary angles of each layer, or None.
        relative_bias: the buckets of the relative biases, or None without biases.
        max_positions: the number of tokens of the longest text that the checkpoint was made for.
        relative_positions: the rows of a table of relative positions, or None without it.
        convolution: the convolution after layer 0, or None.
        residual_factor: the layers' residual sums are this number times the model's states.
    Raises: ValueError if layers of one module have several descriptions: a frozen module has one.
    """

    layers: tuple[LayerSpec, ...]
    module_of_layer: tuple[int, ...]
    rotary: tuple[RotarySpec | None, ...]
    relative_bias: RelativeBiasSpec | None
    max_positions: int
    relative_positions: RelativePositionSpec | None = None
    convolution: ConvolutionSpec | None = None
    residual_factor: float = 1.0

    def __post_init__(self) -> None:
        for number, index in enumerate(self.module_of_layer):
            if self.layers[number] != self.of_module(index):
                raise ValueError(
                    f"layers of one module must have one description, got another one for layer {number} of module "
                    f"{index}: give it a module of its own"
                )

    def state_of(self, residual: Tensor) -> Tensor:
        """The model's state that belongs to a residual sum."""
        return residual if self.residual_factor == 1.0 else residual / self.residual_factor

    @property
    def has_bounded_angles(self) -> bool:
        """Whether rotary angles beyond ``max_positions`` would depend on the batch."""
        return any(spec is not None and spec.bounded for spec in self.rotary)

    @property
    def reads_distances(self) -> bool:
        """Whether attention depends on the tokens' places in a sequence, which a gap between them would change."""
        return (
            self.relative_bias is not None
            or self.relative_positions is not None
            or self.convolution is not None
            or any(spec is not None for spec in self.rotary)
            or any(spec.attention.window != (-1, -1) for spec in self.layers)
            or any(spec.attention.block_size for spec in self.layers)
        )

    @property
    def takes_key_bias(self) -> bool:
        """Whether the attention of every layer takes a bias of each key: every token sees its whole sequence."""
        attentions = [spec.attention for spec in self.layers]
        return self.convolution is None and not any(
            a.position_terms or a.block_size or a.global_attention or a.window != (-1, -1)
            for a in attentions
        )

    @property
    def has_global_attention(self) -> bool:
        """Whether some layers read which tokens are global."""
        return any(spec.attention.global_attention for spec in self.layers)

    def of_module(self, index: int) -> LayerSpec:
        """The description of the first layer that this module computes, or of layer 0 if it computes none."""
        used = self.module_of_layer
        return self.layers[used.index(index) if index in used else 0]


class StackLayer(Protocol):
    """A module that computes layers: ours, or the reader of a live transformers layer."""

    def weights(self) -> LayerWeights: ...

    def dropout(self) -> LayerDropout:
        """The probabilities of dropout, 0 in evaluation."""
        ...

    def adapted(self) -> LayerAdaptation | None:
        """What is added to the layer, or None."""
        ...

    def draws_blocks(self) -> bool:
        """Whether a call draws the random blocks of block-sparse attention, as in training."""
        ...

    def __call__(
        self,
        state: LayerState,
        inputs: AttentionInputs,
        spec: LayerSpec,
        dropout: LayerDropout,
        prepared: Prepared = NOT_PREPARED,
    ) -> LayerState: ...


class StackModules(NamedTuple):
    """The modules and tensors of a model that one call of its stack reads.

    Fields:
        layers: the modules that compute layers.
        first_norm: weight and bias of the norm before the first layer, or None without it.
        relative_biases: one table (num_buckets, num_heads) for all layers, or one for each layer.
        final_dropout_p: the probability of dropout on the last layer's output, 0 in evaluation.
        recomputed: for each of ``layers`` whether the backward computes it again (gradient checkpointing).
        frozen: for each of ``layers`` the copies that :func:`fastenc.freeze` made, or None.
        position_table: the table of relative positions, or None.
        convolution: the weights of the convolution after layer 0, or None.
        layer_vectors: what makes the vectors of layers that have such, or None.
    """

    layers: Sequence[StackLayer]
    first_norm: tuple[Tensor, Tensor | None] | None
    relative_biases: Sequence[Tensor]
    final_dropout_p: float
    recomputed: Sequence[bool]
    frozen: FrozenLayers | None
    position_table: PositionTable | None = None
    convolution: ConvolutionWeights | None = None
    layer_vectors: LayerVectorTable | None = None


def run_stack(
    x: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    spec: StackSpec,
    modules: StackModules,
    visit_input: VisitInput | None = None,
    source: Source | None = None,
    caches: Sequence[LayerCache] | None = None,
    padded_length: int | None = None,
    global_tokens: Tensor | None = None,
    output_tokens: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Iterator[Tensor]:
    """The states x_0, ..., x_L of the stack, each (total_tokens, hidden_size).

        x_i = Layer_i(x_{i-1})

    Args:
        x: (total_tokens, hidden_size), the embeddings' output, which is ``residual_factor`` times x_0.
        visit_input: called before each layer.
        source: what a decoder's layers attend to.
        caches: for each layer its keys and values of earlier tokens; then x has the new tokens only.
        padded_length: the length of the padded batch up to which blocks count, see :func:`fastenc.nn.block_plan`.
        global_tokens: int64 (G,), the global tokens' indices in the batch, for layers with global attention; or None.
        output_tokens: int64 (n,), the indices of the tokens whose last state is needed: x_L has these rows, (n,
            hidden_size), and after its attention the last layer computes these alone. None: all tokens.
        key_bias: float32 (total_tokens,), for a stack that ``takes_key_bias``, or None.
    """
    state = start(x, modules.first_norm, spec.layers[0].out_norm)
    yield spec.state_of(state.residual)
    sequences = (cu_seqlens, max_seqlen)
    inputs = attention_inputs(
        *(x, *sequences, spec, modules, source, caches, padded_length, global_tokens),
        output_tokens,
        key_bias,
    )
    dropouts = with_rng_states(
        [modules.layers[i].dropout() for i in spec.module_of_layer], x.device
    )
    states: Iterable[Tensor] | None = None
    if caches and visit_input is None:
        states = decode_tokens(
            *(state, inputs, spec.module_of_layer, modules.layers, dropouts, modules.frozen)
        )
    if states is None:
        frozen = frozen_stack(x, inputs(0), modules.layers, dropouts, modules.frozen)
        only_layers = visit_input is None and spec.convolution is None
        if only_layers and frozen is not None and frozen.all_layers is not None:
            of_layers = [inputs(number) for number in range(len(spec.layers))]
            states = frozen.layers(spec.module_of_layer, state, of_layers)
        else:
            states = _layer_by_layer(
                *(x, state, cu_seqlens, inputs, spec, modules, dropouts, frozen, visit_input)
            )
    del state  # the layers' loop frees it when the first layer is done
    for number, y in enumerate(states, 1):
        if number < len(spec.layers):
            yield spec.state_of(y)
        else:
            yield F.dropout(y, modules.final_dropout_p)


def _layer_by_layer(
    x: Tensor,
    state: LayerState,
    cu_seqlens: Tensor,
    inputs: Callable[[int], AttentionInputs],
    spec: StackSpec,
    modules: StackModules,
    dropouts: Sequence[LayerDropout],
    frozen: FrozenStack | None,
    visit_input: VisitInput | None,
) -> Iterator[Tensor]:
    """The residual sum after each layer but the last, then the stack's output without the final dropout.

    Each layer is a call of its own.

    Args:
        x, cu_seqlens, visit_input: as :func:`run_stack` takes them.
        state: the state before the first layer.
        inputs: those of each layer's attention, by the layer's number.
        frozen: what runs the layers if they are frozen, or None.
    """
    recomputed = [each and torch.is_grad_enabled() for each in modules.recomputed]
    # A layer that is computed again casts its weights again in the backward instead of keeping the copies.
    casts = (
        None if any(recomputed) else cast_weights(x, (layer.weights() for layer in modules.layers))
    )
    last = len(spec.layers) - 1
    for number, (index, layer_spec) in enumerate(
        zip(spec.module_of_layer, spec.layers, strict=True)
    ):
        of_layer, layer = inputs(number), modules.layers[index]
        if layer_spec.layer_vector_size and modules.layer_vectors is not None:
            vectors = layer_vectors(x, modules.layer_vectors, number, layer_spec)
            of_layer = of_layer._replace(layer_vectors=vectors)
        if visit_input is not None:
            visit_input(number, state.x, of_layer)
        arguments = (state, of_layer, layer_spec, dropouts[number])
        if recomputed[index]:
            state = checkpoint(layer, *arguments, use_reentrant=False)
        elif frozen is not None:
            state = frozen.layer(index, state, of_layer, layer_spec.pre_norm)
        elif modules.frozen is not None:
            state = layer(*arguments, modules.frozen[index])
        else:
            state = layer(
                *arguments, NOT_PREPARED if casts is None else Prepared(cast=casts[index])
            )
        if number == 0 and spec.convolution is not None and modules.convolution is not None:
            added = convolve(
                *(x, cu_seqlens, spec.convolution, modules.convolution),
                state.x,
                of_layer.output_tokens,
            )
            state = LayerState(added, added)
        # A pre-norm layer's output is the residual sum. The norm after it belongs to the next layer or ends the stack.
        yield state.residual if number < last else state.x


def attention_inputs(
    x: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    spec: StackSpec,
    modules: StackModules,
    source: Source | None = None,
    caches: Sequence[LayerCache] | None = None,
    padded_length: int | None = None,
    global_tokens: Tensor | None = None,
    output_tokens: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Callable[[int], AttentionInputs]:
    """A function from a layer's number to the inputs of its attention; tensors are computed once for all layers."""
    bounds = sequence_bounds(x, cu_seqlens, max_seqlen)
    blocks = attention_blocks(x, cu_seqlens, max_seqlen)
    earlier = caches[0].length if caches else 0
    bias = layer_biases(modules.relative_biases, spec.relative_bias, max_seqlen + earlier)
    positions = None
    if spec.relative_positions is not None and modules.position_table is not None:
        positions = relative_positions(modules.position_table, spec.relative_positions, max_seqlen)
    plan = _block_plans(x, cu_seqlens, max_seqlen, spec, modules, padded_length)
    rows = table_rows(spec.max_positions, max_seqlen)
    tables = {
        rotary: rotary_table(rotary, rows, x.device)
        for rotary in set(spec.rotary)
        if rotary is not None
    }

    if global_tokens is not None and not len(global_tokens):
        global_tokens = None  # every layer has a window only

    def of_layer(number: int) -> AttentionInputs:
        rotary, attention = spec.rotary[number], spec.layers[number].attention
        table = None if rotary is None else tables[rotary]
        return AttentionInputs(
            cu_seqlens,
            max_seqlen,
            table,
            bias(number),
            positions,
            plan(number),
            bounds,
            blocks,
            source,
            caches[number] if caches else None,
            global_tokens if attention.global_attention else None,
            key_bias,
            output_tokens if number == len(spec.layers) - 1 else None,
        )

    return of_layer


def _block_plans(
    x: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    spec: StackSpec,
    modules: StackModules,
    padded_length: int | None,
) -> Callable[[int], BlockPlan | None]:
    """A function from a layer's number to its plan of blocks. Layers that draw no blocks share the plan.

    Each call makes its plans again. On a CPU this takes less than a thousandth of a base-size forward at any length, in
    training less than a hundredth. A cache would have to compare the lengths, which are on the device.
    """
    shared: dict[AttentionSpec, BlockPlan | None] = {}

    def of_layer(number: int) -> BlockPlan | None:
        attention = spec.layers[number].attention
        if not attention.block_size:
            return None
        batch = (attention, cu_seqlens, x.shape[0], max_seqlen)
        if modules.layers[spec.module_of_layer[number]].draws_blocks():
            drawn = draw_random_blocks(number, attention, spec.max_positions, x.device)
            return block_plan(*batch, drawn, padded_length)
        if attention not in shared:
            shared[attention] = block_plan(*batch, None, padded_length)
        return shared[attention]

    return of_layer


def ways_of_layers(
    hidden_size: int, tokens: int, spec: StackSpec, modules: StackModules
) -> list[Mapping[str, str | None]]:
    """For each layer {way of running it: why a call now cannot take it, or None} (:mod:`fastenc.nn.ways`).

    The reasons depend on the current mode (training or evaluation, gradients or none) and on the batch's size.

    Args: tokens: number of tokens of the batch, in sequences of 32.
    """
    x = modules.layers[0].weights().down_weight.new_zeros((tokens, hidden_size))
    length = min(32, spec.max_positions)
    offsets = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=x.device)
    source = None
    if any(layer.cross_norm is not None for layer in spec.layers):
        source = Source(x, offsets, length, offsets, length)
    inputs = attention_inputs(x, offsets, length, spec, modules, source)
    ways = []
    for number, (index, layer_spec) in enumerate(
        zip(spec.module_of_layer, spec.layers, strict=True)
    ):
        layer = modules.layers[index]
        arguments = (LayerState(x, x), inputs(number), layer.weights(), layer_spec)
        ways.append(unsupported_reasons(LayerCall(*arguments, layer.dropout(), layer.adapted())))
    return ways
