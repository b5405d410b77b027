"""Span masking and the span-boundary objective (SpanBERT): contiguous words are masked together."""

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

from fastenc._base.seeds import derive_seed
from fastenc.models import EncoderConfig, LossTerm, MaskedLM, ModelOutput
from fastenc.nn import LayerNorm
from fastenc.nn.activation import activate_plain
from fastenc.nn.embedding_table import EmbeddingTable
from fastenc.objectives.base import Objective
from fastenc.objectives.loss_terms import weighted_sum
from fastenc.objectives.mlm import MlmCollator
from fastenc.ops import linear_masked_cross_entropy
from fastenc.ops.gemm import linear
from fastenc.ops.labelled import IGNORED
from fastenc.packing import ModelArguments, PackedBatch, pack_sequences
from fastenc.text.tokenizer_like import TokenizerLike

GEOMETRIC_P, MAX_WORDS = 0.2, 10
# The boundary objective predicts the first 20 tokens of a span. Its position embeddings have the width 200.
MAX_POSITIONS, POSITION_SIZE = 20, 200
TRIES = 100  # random starts that are tried for a span before its length is reduced
SAMPLE = 100  # about this many blocks are checked before training: do they have enough words?
FREE, MASKED, BARRIER = range(3)  # states of a word; a barrier is never masked


class Span(NamedTuple):
    """The tokens [start, end) of a sequence."""

    start: int
    end: int


class SpanCollator:
    """Packs sequences and masks spans of whole words.

    The length of a span, in words, has a geometric distribution with p = 0.2, truncated at ``max_words`` (mean 3.8 for
    10). Its start is uniform. Spans are added until ``mlm_collator.probability`` of the sequence's tokens, rounded up,
    are masked, or until no further word fits. The last span is shortened to the remaining budget. Between two spans and
    at both ends of a sequence, at least one token is not masked, so every span has two neighbours that the model sees.
    The tokens of a span all become mask tokens (80 %), all become random tokens (10 %) or all stay the same (10 %).

    Args:
        mlm_collator: made with ``whole_word=True``. Its probability, replacements, seed and ``static`` are used.
        max_words: largest number of words of a span.
    Warns: if a batch masks less than half of its budget.
    Raises: ValueError if max_words is below 1, or for an ``mlm_collator`` without ``whole_word``.
    Source: Joshi et al. 2019, arXiv:1907.10529, section 3.1.
    """

    def __init__(self, mlm_collator: MlmCollator, max_words: int = MAX_WORDS):
        if max_words < 1:
            raise ValueError(f"max_words must be at least 1, got {max_words}: give more")
        if mlm_collator.word_starts is None:
            raise ValueError(
                "spans consist of whole words, got an MlmCollator that selects tokens: make it with whole_word=True"
            )
        self.mlm_collator, self._word_starts = mlm_collator, mlm_collator.word_starts
        weights = [(1 - GEOMETRIC_P) ** words for words in range(max_words)]
        self._cumulative = [total / sum(weights) for total in accumulate(weights)]

    def __call__(self, sequences: Sequence[Sequence[int]], step: int) -> ModelArguments:
        """The model's arguments.

        Returns: {"batch", "labels" and "max_labels" as ``MlmCollator`` makes them,
            "spans": int64 (predicted, 4), one row for each of the first 20 tokens of each span: the token's index in
            the packed batch, the indices of the tokens before and after its span, its position in the span}.
        """
        batch = pack_sequences(sequences)
        rng = Random(derive_seed(self.mlm_collator.seed, step, "spans"))
        action_samples, token_samples = (
            torch.zeros(batch.total_tokens, dtype=torch.float64) for _ in range(2)
        )
        selected = torch.zeros(batch.total_tokens, dtype=torch.bool)
        rows: list[tuple[int, int, int, int]] = []
        lengths = batch.cu_seqlens.diff().tolist()
        offset = total_budget = 0
        for ids in batch.input_ids.split(lengths):
            if self.mlm_collator.static:
                rng = Random(derive_seed(self.mlm_collator.seed, str(ids.tolist())))
            budget = self._budget(ids)
            total_budget += budget
            for start, end in self._spans(ids, budget, rng):
                span = slice(offset + start, offset + end)
                selected[span] = True
                action_samples[span] = rng.random()
                samples = [rng.random() for _ in range(end - start)]
                # In float32 a sample could be rounded to 1, and select an id beyond the vocabulary.
                token_samples[span] = torch.tensor(samples, dtype=torch.float64)
                left, right = span.start - 1, span.stop
                rows += [
                    (left + 1 + i, left, right, i) for i in range(min(end - start, MAX_POSITIONS))
                ]
            offset += len(ids)
        masked = int(selected.sum())
        if 2 * masked < total_budget:
            warnings.warn(
                f"the spans mask {masked} of the {total_budget} tokens that they should, because single words have too "
                "many tokens for such short sequences: give larger blocks, or a tokenizer trained on these languages",
                stacklevel=2,
            )
        ids = batch.input_ids
        return {
            "batch": replace(
                batch,
                input_ids=self.mlm_collator.replace(ids, selected, action_samples, token_samples),
            ),
            "labels": torch.where(selected, ids, IGNORED),
            "max_labels": masked,
            "spans": torch.tensor(rows, dtype=torch.int64).view(-1, 4),
        }

    def items(self, arguments: ModelArguments) -> dict[str, int]:
        """Number of items that each term is a mean over, see :func:`fastenc.objectives.loss_terms.count_items`."""
        return {"mlm": arguments["max_labels"], "sbo": len(arguments["spans"])}

    def count_words(self, ids: Sequence[int]) -> int:
        """Number of words of a token sequence, special tokens excluded."""
        tokens = torch.tensor(ids)
        return int((self._word_starts(tokens) & ~self.mlm_collator.is_special[tokens]).sum())

    def _budget(self, ids: Tensor) -> int:
        """Number of tokens of a sequence to mask."""
        return math.ceil(
            self.mlm_collator.probability * int((~self.mlm_collator.is_special[ids]).sum())
        )

    def _spans(self, ids: Tensor, budget: int, rng: Random) -> list[Span]:
        """Spans of one sequence with at most ``budget`` tokens in all, in the order in which they are sampled."""
        special = self.mlm_collator.is_special[ids]
        starts = self._word_starts(ids).nonzero().flatten().tolist()
        ends = [*starts[1:], len(ids)]
        state = bytearray(
            BARRIER if is_special else FREE for is_special in special[starts].tolist()
        )
        if state:
            state[0] = state[-1] = BARRIER
        spans: list[Span] = []
        words = self._sample_length(rng)
        while budget and words:
            for _ in range(TRIES):
                first = rng.randrange(len(state))
                last = first + words
                fits = not any(state[first:last]) and last < len(state)
                if not fits or MASKED in (state[first - 1], state[last]):
                    continue
                while last > first and ends[last - 1] - starts[first] > budget:
                    last -= 1
                if last > first:
                    break
            else:  # no try found room for this number of words
                words -= 1
                continue
            state[first:last] = bytes([MASKED]) * (last - first)
            spans.append(Span(starts[first], ends[last - 1]))
            budget -= spans[-1].end - spans[-1].start
            words = self._sample_length(rng)
        return spans

    def _sample_length(self, rng: Random) -> int:
        """Number of words of the next span."""
        return bisect_left(self._cumulative, rng.random()) + 1


class SpanBoundaryHead(nn.Module):
    """The head that predicts token i of the span s … e from its two neighbours x and its position embedding p:

    y_i = LN(gelu(W2 LN(gelu(W1 [x_{s-1}; x_{e+1}; p_{i-s+1}] + b1)) + b2)), with the logits y_i E^T + bias.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        width, decoder_width = config.hidden_size, config.architecture.decoder_width(config)
        self.positions = EmbeddingTable(MAX_POSITIONS, POSITION_SIZE)
        self.first = nn.Linear(2 * width + POSITION_SIZE, width)
        self.first_norm = LayerNorm(width, eps=config.eps)
        self.second = nn.Linear(width, decoder_width)
        self.second_norm = LayerNorm(decoder_width, eps=config.eps)
        self.bias = nn.Parameter(self.first.bias.new_zeros(config.vocab_size))

    def transform(self, hidden: Tensor, spans: Tensor) -> Tensor:
        """The vectors y: (predicted, decoder_width).

        Args:
            hidden: (total_tokens, hidden_size).
            spans: int64 (predicted, 4) of :class:`SpanCollator`.
        """
        _, left, right, position = spans.unbind(1)
        x = torch.cat(
            [
                hidden.index_select(0, left),
                hidden.index_select(0, right),
                self.positions(position).to(hidden.dtype),
            ],
            dim=1,
        )
        for dense, norm in ((self.first, self.first_norm), (self.second, self.second_norm)):
            x = norm(activate_plain(linear(x, dense.weight), dense.bias, "gelu"))
        return x


class SpanMaskedLM(MaskedLM):
    """Masked LM with the span-boundary objective (SpanBERT): predict a span's tokens from its two neighbours.

        loss = masked-LM loss, mean over the masked tokens
             + span-boundary loss, mean over the tokens in ``spans``

    Its checkpoints are masked-LM checkpoints with additional weights, which transformers ignores.
    Source: Joshi et al. 2019, arXiv:1907.10529.
    """

    optional_parts = ("boundary",)  # a masked LM can be trained further with this objective
    loss_ignores_padding = False

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.boundary = SpanBoundaryHead(config)
        self.init_modules(self.boundary)

    def forward(
        self,
        batch: PackedBatch,
        labels: Tensor | None = None,
        max_labels: int | None = None,
        spans: Tensor | None = None,
    ) -> ModelOutput:
        """Predict masked tokens, also from the neighbours of their spans.

        Args:
            labels, max_labels: as in ``MaskedLM``.
            spans: int64 (predicted, 4) of :class:`SpanCollator`.
        Returns: the loss and its terms; if labels or spans is None, what ``MaskedLM`` returns.
        """
        if labels is None or spans is None:
            return super().forward(batch, labels, max_labels)
        encoded, table = self.encode(batch)
        hidden = encoded.last_hidden_state
        targets = labels.index_select(0, spans[:, 0])
        boundary_loss = linear_masked_cross_entropy(
            self.boundary.transform(hidden, spans),
            table,
            self.boundary.bias,
            targets,
            max_labels=targets.shape[0],
        )
        masked_loss = self.loss(self.labelled(hidden, labels, max_labels), table)
        terms = {"mlm": LossTerm(masked_loss), "sbo": LossTerm(boundary_loss)}
        return ModelOutput(loss=weighted_sum(terms), terms=terms)

    def head_names(self) -> dict[str, str]:
        names = ("positions", "first", "first_norm", "second", "second_norm", "bias")
        return {
            **super().head_names(),
            **{f"boundary.{name}": f"span_boundary.{name}" for name in names},
        }


def _collator(
    tokenizer: TokenizerLike, blocks: Sequence[Sequence[int]], seed: int, **masking: Any
) -> SpanCollator:
    collator = SpanCollator(MlmCollator(tokenizer, seed=seed, **{**masking, "whole_word": True}))
    sample = range(0, len(blocks), max(1, len(blocks) // SAMPLE))
    words = max(collator.count_words(blocks[index]) for index in sample)
    if words < MAX_WORDS:
        raise ValueError(
            f"a block must have at least {MAX_WORDS} words, the length of the longest span, got blocks of at most "
            f"{words} words: give longer documents, or larger blocks"
        )
    return collator


SPAN = Objective(SpanMaskedLM, ("full-sentences", "doc-sentences"), _collator)
