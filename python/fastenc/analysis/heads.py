"""What each attention head looks at, in one pass, without its probabilities in memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastenc.analysis.states import inner_tokens, visit_texts
from fastenc.models.word_vectors import visit_states
from fastenc.ops import head_statistics
from fastenc.ops._gemm import linear
from fastenc.ops.head_statistics import NAMES, HeadStatistics
from fastenc.packing import PackedBatch


def visit_heads(
    encoder: Any,
    batch: PackedBatch,
    visit: Callable[[int, HeadStatistics], None],
    *,
    targets: Tensor | None = None,
    skip_ends: bool = False,
) -> None:
    """Run the encoder and call ``visit(layer, statistics)`` for each layer, from 0; nothing is kept.

    Queries and keys are formed once more from each layer's input, because the layer itself keeps none.

    Args:
        targets, skip_ends: as in :func:`fastenc.ops.head_statistics`.
    """

    def look(layer: int, state: Tensor) -> None:
        visit(layer, _statistics(encoder, layer, state, batch, targets, skip_ends))

    visit_states(encoder, batch, range(encoder.config.num_layers), look)


@dataclass
class HeadSummary:
    """Means over the tokens of texts, special ones left out.

    Fields:
        tokens: their number.
        means: name of a statistic → float64 (layers, heads); see :class:`fastenc.ops.head_statistics.HeadStatistics`.
    """

    tokens: int
    means: dict[str, Tensor]


def summarize_heads(
    encoder: Any, texts: Iterable[str], *, batch_size: int = 32, show_progress: bool | None = False
) -> HeadSummary:
    """Every head's mean entropy, distance and probabilities over the tokens of texts.

    Raises: ValueError for texts without tokens.
    """
    shape = (encoder.config.num_layers, encoder.config.num_heads)
    names = [name for name in NAMES if name != "target"]
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name in names}
    tokens = 0

    def look(layer: int, state: Tensor, batch: PackedBatch, places: list[int]) -> None:
        nonlocal tokens
        found = _statistics(encoder, layer, state, batch)
        inside = inner_tokens(batch)
        tokens += int(inside.sum()) if layer == 0 else 0
        for name in names:
            sums[name][layer] += getattr(found, name)[inside].double().sum(0).cpu()

    layers = range(encoder.config.num_layers)  # the inputs of all
    visit_texts(
        encoder, texts, look, layers=layers, batch_size=batch_size, show_progress=show_progress
    )
    if not tokens:
        raise ValueError("the texts have no tokens: give some with words")
    return HeadSummary(tokens, {name: total / tokens for name, total in sums.items()})


def _statistics(
    encoder: Any,
    layer: int,
    state: Tensor,
    batch: PackedBatch,
    targets: Tensor | None = None,
    skip_ends: bool = False,
) -> HeadStatistics:
    """Of a layer, from its input. Raises: ValueError where scores are more than products of q and k."""
    spec = encoder.specs[layer]
    plain = not (spec.pre_norm or encoder.rotary[layer] or encoder.relative_bias is not None)
    if not plain or spec.attention.window != (-1, -1):
        raise ValueError(
            f"what heads look at is measured in post-norm layers without rotary positions, relative biases and "
            f"windows, got a {encoder.config.family} model: take one like BERT"
        )
    heads, width = encoder.config.num_heads, encoder.config.hidden_size
    qkv = encoder.layers[layer].qkv
    both = linear(state, qkv.weight[: 2 * width], qkv.bias[: 2 * width])
    q, k = both.view(state.shape[0], 2, heads, width // heads).unbind(1)
    return head_statistics(
        q, k, batch.cu_seqlens, batch.max_seqlen, targets=targets, skip_ends=skip_ends
    )
