"""What a layer computes from: the state, and what its attention needs besides."""

from typing import NamedTuple

from torch import Tensor

from fastenc.nn.layer_cache import LayerCache
from fastenc.ops.attention_blocks import AttentionBlocks
from fastenc.ops.block_sparse_attention import BlockPlan


class RelativePositions(NamedTuple):
    """The embeddings of relative positions (rows, hidden_size), and int32 (2 R + 1,) the row of each distance key -
    query from -R to R; larger distances have the row of the last one. ``first``: the number in the table of the first
    of the rows."""

    embeddings: Tensor
    slots: Tensor
    first: int = 0


class Source(NamedTuple):
    """What the tokens of a decoder attend to.

    Fields:
        states: (source_tokens, hidden_size), an encoder's states of packed sequences.
        cu_seqlens, max_seqlen: these sequences.
        cu_targets, max_targets: the tokens of the layer's input that attend to each of them, as offsets. A sequence may
            have several targets, which follow each other.
    """

    states: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    cu_targets: Tensor
    max_targets: int


class AttentionInputs(NamedTuple):
    """Inputs of attention that depend on the batch and are shared by layers; see :func:`fastenc.ops.attention`.

    Fields:
        cu_seqlens, max_seqlen: the sequences.
        rotary: float32 (positions, rotary_dim), table of rotary angles, or None.
        relative_bias: (num_heads, 2 R + 1), or None.
        relative_positions: for disentangled attention, or None.
        block_plan: for block-sparse attention; None where every token of a sequence sees every other.
        bounds: int32 (2, total_tokens) from :func:`fastenc.ops.attention.sequence_bounds`, or None.
        blocks: tables from :func:`fastenc.ops.attention_blocks.attention_blocks`, or None.
        source: the source of layers that attend to one, or None.
        cache: the layer's keys and values of earlier tokens, to which this call adds its own, or None.
        global_tokens: int64 (G,), the indices of the global tokens, ascending; None without any.
        key_bias: float32 (total_tokens,), added to every score of a key, -inf for keys that nobody sees; or None.
        output_tokens: int64 (n,), the indices of the tokens of which the layer's output is needed, or None for all. All
            tokens are attended to; what follows attention is computed for these only.
        layer_vectors: (total_tokens, layer_vector_size), the layer's vector of each token, or None.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    rotary: Tensor | None = None
    relative_bias: Tensor | None = None
    relative_positions: RelativePositions | None = None
    block_plan: BlockPlan | None = None
    bounds: Tensor | None = None
    blocks: AttentionBlocks | None = None
    source: Source | None = None
    cache: LayerCache | None = None
    global_tokens: Tensor | None = None
    key_bias: Tensor | None = None
    output_tokens: Tensor | None = None
    layer_vectors: Tensor | None = None


class LayerState(NamedTuple):
    """What one layer passes to the next, two tensors (total_tokens, hidden_size).

    Fields:
        x: input of the next sublayer.
        residual: what the next sublayer's output is added to; in post-norm stacks the same tensor as x.
    """

    x: Tensor
    residual: Tensor

    def of_tokens(self, tokens: Tensor | None) -> "LayerState":
        """The rows of some tokens, or without tokens all."""
        if tokens is None:
            return self
        x = rows_of(self.x, tokens)
        return LayerState(x, x if self.residual is self.x else rows_of(self.residual, tokens))


def rows_of(x: Tensor, tokens: Tensor | None) -> Tensor:
    """The rows of some tokens in x (total_tokens, width), or without tokens all."""
    return x if tokens is None else x.index_select(0, tokens)
