"""Span masking and the span-boundary objective: contiguous words are hidden together."""

import math
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastenc._seeds import derive_seed
from fastenc.models import EncoderConfig, LossPart, MaskedLM, ModelOutput
from fastenc.nn import LayerNorm
from fastenc.nn.encoder_layer import activate
from fastenc.objectives.base import Objective
from fastenc.objectives.mlm import IGNORED, MlmCollator
from fastenc.objectives.parts import weighted_sum
from fastenc.ops import linear_masked_cross_entropy
from fastenc.ops._matmul import linear
from fastenc.packing import PackedBatch, pack_sequences

GEOMETRIC_P, MAX_WORDS = 0.2, 10
# Tokens of a span that the boundary objective predicts, and the width of its position embeddings.
MAX_PLACES, POSITION_SIZE = 20, 200
TRIES = 100
SAMPLE = 100  # blocks, about, whose words are counted before training
FREE, MASKED, BARRIER = range(3)


class Span(NamedTuple):
    """Tokens start to end - 1 of a packed batch."""

    start: int
    end: int


class SpanCollator:
    """Packs sequences and masks spans of whole words.

    Lengths, in words, are geometric with p = 0.2 among 1 to ``max_words`` (3.8 on average for 10), starts are
    uniform. Spans are added until no further word fits into the budget of ``masks.probability`` of a sequence's
    tokens, rounded up; the last one is shortened to what is left. Between two spans, and at both ends of a sequence,
    a token stays, so that every span has two observed neighbours. A span becomes mask tokens (80 %), random tokens
    (10 %) or stays (10 %) as one.

    Args:
        masks: a collator made with ``whole_word=True``; its probability, replacements, seed and ``static`` are used.
    Raises: ValueError for max_words below 1, or ``masks`` without words. Warns where less than half of a batch's
        budget is masked.
    Source: Joshi et al. 2019, arXiv:1907.10529, section 3.1.
    """

    def __init__(self, masks: MlmCollator, max_words: int = MAX_WORDS):
        if max_words < 1:
            raise ValueError(f"max_words must be at least 1, got {max_words}")
        if masks.word_starts is None:
            raise ValueError("spans are of whole words: make masks with whole_word=True")
        self.masks, self._word_starts = masks, masks.word_starts
        weights = [(1 - GEOMETRIC_P) ** words for words in range(max_words)]
        self._cumulative = [total / sum(weights) for total in accumulate(weights)]

    def __call__(self, sequences: Sequence[Sequence[int]], step: int) -> dict[str, Any]:
        """What ``MlmCollator`` gives, and "spans": int64 (predicted, 4).

        A row of "spans" is a masked token's place in the batch, that of the token before its span, that of the
        token after it, and the token's place in its span, which is below 20 (tokens after it have no row).
        """
        batch = pack_sequences(sequences)
        draw = Random(derive_seed(self.masks.seed, step, "spans"))
        fate, choice = (torch.zeros(batch.total_tokens, dtype=torch.float64) for _ in range(2))
        selected = torch.zeros(batch.total_tokens, dtype=torch.bool)
        rows: list[tuple[int, int, int, int]] = []
        lengths = batch.cu_seqlens.diff().tolist()
        offset = planned = 0
        for ids in batch.input_ids.split(lengths):
            if self.masks.static:
                draw = Random(derive_seed(self.masks.seed, str(ids.tolist())))
            budget = self._budget(ids)
            planned += budget
            for start, end in self._spans(ids, budget, draw):
                place = slice(offset + start, offset + end)
                selected[place] = True
                fate[place] = draw.random()
                choice[place] = torch.tensor([draw.random() for _ in range(end - start)]).double()
                left, right = place.start - 1, place.stop
                rows += [
                    (left + 1 + i, left, right, i) for i in range(min(end - start, MAX_PLACES))
                ]
            offset += len(ids)
        masked = int(selected.sum())
        if 2 * masked < planned:
            warnings.warn(
                "spans of whole words mask less than half of the tokens that they should, because words have too many "
                "tokens for such short sequences: give larger blocks, or a vocabulary of these languages",
                stacklevel=2,
            )
        ids = batch.input_ids
        return {
            "batch": replace(batch, input_ids=self.masks.replace(ids, selected, fate, choice)),
            "labels": torch.where(selected, ids, IGNORED),
            "max_labelled": masked,
            "spans": torch.tensor(rows, dtype=torch.int64).view(-1, 4),
        }

    def items(self, arguments: dict[str, Any]) -> dict[str, int]:
        return {"mlm": arguments["max_labelled"], "sbo": len(arguments["spans"])}

    def count_words(self, ids: Sequence[int]) -> int:
        tokens = torch.tensor(ids)
        return int((self._word_starts(tokens) & ~self.masks.is_special[tokens]).sum())

    def _budget(self, ids: Tensor) -> int:
        return math.ceil(self.masks.probability * int((~self.masks.is_special[ids]).sum()))

    def _spans(self, ids: Tensor, budget: int, draw: Random) -> list[Span]:
        """Spans of one sequence, of at most ``budget`` tokens, in the order drawn."""
        special = self.masks.is_special[ids]
        starts = self._word_starts(ids).nonzero().flatten().tolist()
        ends = [*starts[1:], len(ids)]
        state = bytearray(
            BARRIER if is_special else FREE for is_special in special[starts].tolist()
        )
        if state:
            state[0] = state[-1] = BARRIER
        spans: list[Span] = []
        words = self._draw_length(draw)
        while budget and words:
            for _ in range(TRIES):
                first = draw.randrange(len(state))
                last = first + words
                fits = not any(state[first:last]) and last < len(state)
                if not fits or MASKED in (state[first - 1], state[last]):
                    continue
                while last > first and ends[last - 1] - starts[first] > budget:
                    last -= 1
                if last > first:
                    break
            else:  # there is no room for so many words
                words -= 1
                continue
            state[first:last] = bytes([MASKED]) * (last - first)
            spans.append(Span(starts[first], ends[last - 1]))
            budget -= spans[-1].end - spans[-1].start
            words = self._draw_length(draw)
        return spans

    def _draw_length(self, draw: Random) -> int:
        return bisect_left(self._cumulative, draw.random()) + 1


class SpanBoundaryHead(nn.Module):
    """y_i = LN(gelu(W2 LN(gelu(W1 [x_{s-1}; x_{e+1}; p_{i-s+1}] + b1)) + b2)); logits y_i E^T + bias."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        width = config.hidden_size
        self.positions = nn.Embedding(MAX_PLACES, POSITION_SIZE)
        self.first = nn.Linear(2 * width + POSITION_SIZE, width)
        self.first_norm = LayerNorm(width, eps=config.eps)
        self.second = nn.Linear(width, config.embedding_size)
        self.second_norm = LayerNorm(config.embedding_size, eps=config.eps)
        self.bias = nn.Parameter(self.first.bias.new_zeros(config.vocab_size))

    def transform(self, hidden: Tensor, spans: Tensor) -> Tensor:
        """(tokens, hidden_size), (predicted, 4) → (predicted, embedding_size)."""
        _, left, right, place = spans.unbind(1)
        x = torch.cat(
            [
                hidden.index_select(0, left),
                hidden.index_select(0, right),
                self.positions(place).to(hidden.dtype),
            ],
            dim=1,
        )
        for dense, norm in ((self.first, self.first_norm), (self.second, self.second_norm)):
            x = norm(activate(linear(x, dense.weight), dense.bias, "gelu"))
        return x


class SpanMaskedLM(MaskedLM):
    """Masked LM, and the span-boundary objective: a span's tokens predicted from its two neighbours.

    loss = mean over the masked tokens + mean over those that the boundaries predict. Its checkpoints are masked-LM
    checkpoints with some weights more, which transformers leaves unread.
    Source: Joshi et al. 2019, arXiv:1907.10529.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.boundary = SpanBoundaryHead(config)
        self.boundary.apply(self.init_weights)

    def forward(
        self,
        batch: PackedBatch,
        labels: Tensor | None = None,
        max_labelled: int | None = None,
        spans: Tensor | None = None,
    ) -> ModelOutput:
        """Args: labels, max_labelled as in ``MaskedLM``; spans as from ``SpanCollator``; both or neither."""
        if labels is None or spans is None:
            return super().forward(batch, labels, max_labelled)
        encoded, table = self.encode(batch)
        hidden = encoded.last_hidden_state
        targets = labels.index_select(0, spans[:, 0])
        boundary_loss = linear_masked_cross_entropy(
            self.boundary.transform(hidden, spans),
            table,
            self.boundary.bias,
            targets,
            max_labelled=targets.shape[0],
        )
        masked_loss = self.loss(self.labelled(hidden, labels, max_labelled), table)
        parts = {"mlm": LossPart(masked_loss), "sbo": LossPart(boundary_loss)}
        return ModelOutput(loss=weighted_sum(parts), parts=parts)

    def head_names(self) -> dict[str, str]:
        own = ("positions", "first", "first_norm", "second", "second_norm", "bias")
        return {
            **super().head_names(),
            **{f"boundary.{name}": f"span_boundary.{name}" for name in own},
        }


def _collator(
    tokenizer: Any, blocks: Sequence[Sequence[int]], seed: int, **masking: Any
) -> SpanCollator:
    collator = SpanCollator(MlmCollator(tokenizer, seed=seed, **{**masking, "whole_word": True}))
    some = range(0, len(blocks), max(1, len(blocks) // SAMPLE))
    words = max(collator.count_words(blocks[place]) for place in some)
    if words < MAX_WORDS:
        raise ValueError(
            f"the text must be longer than a span, of up to {MAX_WORDS} words, got blocks of at most {words} "
            "words: give longer documents, or larger blocks"
        )
    return collator


SPAN = Objective(SpanMaskedLM, ("full-sentences", "doc-sentences"), _collator)
