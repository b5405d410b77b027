"""What each attention head looks at, in one pass, without its probabilities in memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastenc.analysis.states import batches_of, inner_tokens
from fastenc.nn.evaluation_mode import evaluation_mode
from fastenc.nn.layer_spec import AttentionInputs
from fastenc.ops import head_statistics, rotary
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

    Queries and keys are computed again from each layer's input, because the layer does not keep them.

    Args:
        targets, skip_ends: as in :func:`fastenc.ops.head_statistics`.
    Raises: ValueError for an encoder with an adaptation in use that is not merged.
    """
    adapted = encoder.adapted
    if adapted.current is not None and not adapted.unmerged_weights:
        raise ValueError(
            f"what heads look at is measured without an adaptation, got one in use ({adapted.current!r}): merge it "
            "into the weights first (fastenc.adapt.merge_adaptation)"
        )

    def look(layer: int, x: Tensor, inputs: AttentionInputs) -> None:
        spec = encoder.specs[layer].attention
        qkv = encoder.layers[encoder.module_of_layer[layer]].qkv
        rows = 2 * spec.num_heads * spec.head_dim
        both = linear(x, qkv.weight[:rows], None if qkv.bias is None else qkv.bias[:rows])
        q, k = both.view(x.shape[0], 2, spec.num_heads, spec.head_dim).unbind(1)
        cu_seqlens, max_seqlen = inputs.cu_seqlens, inputs.max_seqlen
        if inputs.rotary is not None:
            q, k = (rotary(side, inputs.rotary, cu_seqlens, max_seqlen) for side in (q, k))
        found = head_statistics(
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
        visit(layer, found)

    encoder(batch, visit_input=look)


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
    with evaluation_mode(encoder), torch.inference_mode():
        for batch, _ in batches_of(encoder, texts, batch_size, show_progress):
            inside = inner_tokens(batch)
            tokens += int(inside.sum())

            def add(layer: int, found: HeadStatistics, inside: Tensor = inside) -> None:
                for name in names:
                    sums[name][layer] += getattr(found, name)[inside].double().sum(0).cpu()

            visit_heads(encoder, batch, add)
    if not tokens:
        raise ValueError("the texts have no tokens: give some with words")
    return HeadSummary(tokens, {name: total / tokens for name, total in sums.items()})
