"""Spans of words on transformers' encoder: a head as a user would write it from torch's functions, on padded
batches."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fastenc.models.heads.span_scores import BoundaryScores


class PlainSpanClassifier(nn.Module):
    """The scores of :class:`fastenc.models.heads.span_scores.BoundaryScores`; a word's mean comes from prefix sums.

    Args:
        head: gives the sizes and the initial weights.
    """

    def __init__(self, encoder: nn.Module, head: BoundaryScores):
        super().__init__()
        self.encoder, self.dropout = encoder, nn.Dropout(encoder.config.hidden_dropout_prob)
        self.project, self.bias, self.out = head.project, head.bias, head.out

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        words: Tensor,
        spans: Tensor,
        labels: Tensor,
    ) -> dict[str, Tensor]:
        """Args:
        words: (batch, W), each word's first subword; spans: (batch, S, 2), first and last word.
        labels: (batch, S), -100 where a shorter sentence has no span.
        """
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        vectors = hidden.gather(1, words[..., None].expand(-1, -1, hidden.shape[2]))
        first, last, content = self.project(self.dropout(vectors)).chunk(3, dim=2)
        sums = F.pad(content.cumsum(1), (0, 0, 1, 0))
        rows = torch.arange(len(spans), device=spans.device)[:, None]
        start, end = spans.unbind(2)
        mean = (sums[rows, end + 1] - sums[rows, start]) / (end + 1 - start)[..., None]
        logits = self.out(F.gelu(first[rows, start] + last[rows, end] + mean + self.bias))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def collate(rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Pad rows of ``input_ids``, ``words``, ``spans`` and ``labels``."""
    padded = lambda name, value=0: pad_sequence([row[name] for row in rows], True, value)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    ids = padded("input_ids")
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long(),
        "words": padded("words"),
        "spans": padded("spans"),
        "labels": padded("labels", -100),
    }
