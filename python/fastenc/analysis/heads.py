"""Statistics of each attention head's probabilities, computed without storing the probabilities."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastenc.analysis.errors import TooFewData, UnknownAttention
from fastenc.analysis.states import batches_of, inner_tokens
from fastenc.models.encoder import Encoder
from fastenc.nn.attend import normalise_queries_and_keys
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.nn.features import features_of
from fastenc.nn.layer_inputs import AttentionInputs
from fastenc.nn.layer_spec import neighbours_to_halves
from fastenc.nn.layer_weights import stack, stack_biases
from fastenc.ops import head_statistics, rotary
from fastenc.ops.gemm import linear
from fastenc.ops.head_statistics import NAMES, HeadStatistics
from fastenc.packing import PackedBatch

# The features of attention that the statistics compute, or that change only the values, which they do not read.
TAKES = frozenset(
    {"window", "key_heads", "head_norm_eps", "rotates_neighbours", "normalises_values"}
    | {"normalises_heads_together"}
)


def visit_heads(
    encoder: Encoder,
    batch: PackedBatch,
    visit: Callable[[int, HeadStatistics], None],
    *,
    targets: Tensor | None = None,
    skip_ends: bool = False,
) -> None:
    """Run the encoder and call ``visit(layer, statistics)`` for each layer, from 0 on.

    Queries and keys are computed again from each layer's input, because the layer does not keep them.

    Args:
        encoder: a :class:`fastenc.Encoder`.
        visit: function of the layer's number and a :class:`fastenc.ops.head_statistics.HeadStatistics`.
        targets, skip_ends: as in :func:`fastenc.ops.head_statistics`.
    Raises: ValueError for an encoder with an adaptation that is not merged into its weights. UnknownAttention (a
        ValueError) for the attention of DeBERTa and Longformer.
    """
    unknown = frozenset[str]().union(*(features_of(s.attention) for s in encoder.stack.layers))
    if unknown - TAKES:
        raise UnknownAttention(
            f"the statistics of heads do not compute {', '.join(sorted(unknown - TAKES))}, which this model's "
            "attention has: read transformers' output_attentions"
        )
    adapted = encoder.adapted
    if adapted.current is not None and not adapted.unmerged_weights:
        raise ValueError(
            f"the statistics of heads need an encoder without an adaptation, got {adapted.current!r}: merge it into "
            "the weights first (fastenc.adapt.merge_adaptation)"
        )

    weights = encoder.layer_weights()

    def measure(layer: int, x: Tensor, inputs: AttentionInputs) -> None:
        spec = encoder.stack.layers[layer].attention
        of_layer, _ = weights[encoder.stack.module_of_layer[layer]]
        weight = stack(of_layer.qkv_weights)
        bias = stack_biases(of_layer.qkv_biases, of_layer.qkv_weights)
        heads, key_heads, _ = spec.heads
        rows = (heads + key_heads) * spec.head_dim
        qk = linear(x, weight[:rows], None if bias is None else bias[:rows])
        qk = qk.view(x.shape[0], heads + key_heads, spec.head_dim)
        if spec.rotates_neighbours:
            qk = neighbours_to_halves(qk)
        q, k = qk.split((heads, key_heads), 1)
        if spec.head_norm_eps is not None:
            q, k = normalise_queries_and_keys(q, k, of_layer, spec)
        cu_seqlens, max_seqlen = inputs.cu_seqlens, inputs.max_seqlen
        if inputs.rotary is not None:
            q, k = (rotary(side, inputs.rotary, cu_seqlens, max_seqlen) for side in (q, k))
        if heads != key_heads:
            k = k.repeat_interleave(heads // key_heads, 1)
        statistics = head_statistics(
            q,
            k,
            cu_seqlens,
            max_seqlen,
            targets=targets,
            skip_ends=skip_ends,
            softmax_scale=spec.scale,
            window_size=spec.window,
            relative_bias=inputs.relative_bias,
        )
        visit(layer, statistics)

    encoder(batch, visit_input=measure, pooled=False)


@dataclass
class HeadSummary:
    """Means of the heads' statistics over the tokens of texts, special tokens excluded.

    Fields:
        tokens: number of these tokens.
        means: {statistic: float64 (layers, heads)}; see :class:`fastenc.ops.head_statistics.HeadStatistics`.
    """

    tokens: int
    means: dict[str, Tensor]


def summarize_heads(
    encoder: Encoder,
    texts: Iterable[str],
    *,
    batch_size: int = 32,
    show_progress: bool | None = False,
) -> HeadSummary:
    """Mean entropy, distance and probabilities of every head over the tokens of texts.

    Args:
        encoder: a :class:`fastenc.Encoder` with a tokenizer.
        batch_size: number of texts in a batch.
        show_progress: None shows a bar if stderr is a terminal.
    Raises: TooFewData (a ValueError) if the texts have no tokens.
    """
    shape = (encoder.config.num_layers, encoder.config.num_heads)
    names = [name for name in NAMES if name != "target"]
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name in names}
    tokens, tokenizer = 0, encoder.own_tokenizer()
    with evaluation_mode(encoder), torch.inference_mode():
        for batch, _ in batches_of(encoder, texts, batch_size, show_progress):
            inside = inner_tokens(batch, tokenizer)
            tokens += int(inside.sum())

            def add(layer: int, statistics: HeadStatistics, inside: Tensor = inside) -> None:
                for name in names:
                    sums[name][layer] += getattr(statistics, name)[inside].double().sum(0).cpu()

            visit_heads(encoder, batch, add)
    if not tokens:
        raise TooFewData("the texts must have tokens, got none: give texts with words")
    return HeadSummary(tokens, {name: total / tokens for name, total in sums.items()})
