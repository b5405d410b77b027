"""Masked LM with a second task over pairs of segments: next-sentence or sentence-order prediction."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc.data.segments import SegmentPair
from fastenc.models import EncoderConfig, LossPart, MaskedLM, ModelOutput
from fastenc.objectives.base import Objective, longest
from fastenc.objectives.mlm import MlmCollator, mix
from fastenc.objectives.parts import weighted_sum
from fastenc.packing import PackedBatch, pack_sequences

NEGATIVES = ("random", "swapped")


class PairCollator:
    """Packs [CLS] A [SEP] B [SEP] with token types 0 and 1; every other pair, by chance, is a wrong one. Then masks.

    A wrong pair has the second segment of a pair of another document, cut to the longest pair's length ("random":
    next-sentence prediction), or its own two segments in the other order ("swapped": sentence-order prediction).
    Both are drawn anew at every call, from (seed, step) alone.

    Args:
        masks: masks the pairs' tokens; its seed is the collator's.
        pairs: the pairs that random segments are taken from.
    Raises: ValueError when random segments would have to come from the only document.
    Source: Devlin et al. 2018, arXiv:1810.04805 (next sentence); Lan et al. 2019, arXiv:1909.11942 (order).
    """

    def __init__(self, masks: MlmCollator, pairs: Sequence[SegmentPair], negatives: str = "random"):
        if negatives not in NEGATIVES:
            raise ValueError(f"negatives must be one of {NEGATIVES}, got {negatives!r}")
        self.masks, self.negatives = masks, negatives
        # A store's pairs stand in the order of their documents, and stay on the disk.
        stored = getattr(pairs, "documents", None)
        in_order = lambda: sorted(pairs, key=lambda pair: pair.document)
        self.pairs = pairs if stored is not None else in_order()
        self.max_length = longest(pairs)
        self._documents = [pair.document for pair in self.pairs] if stored is None else stored
        if negatives == "random" and self._documents[0] == self._documents[-1]:
            raise ValueError(
                "next-sentence prediction takes its wrong segments from another document, got pairs of one "
                "document: give more documents (an empty line separates them in a text file), or predict the order"
            )

    def __call__(self, pairs: Sequence[SegmentPair], step: int) -> dict[str, Any]:
        """What ``MlmCollator`` gives, and "pair_labels": int64 (pairs,), 1 for a wrong pair."""
        draw = Random(mix(self.masks.seed, step, "pairs"))
        cls, sep = self.masks.special.cls, self.masks.special.sep
        sequences, types, labels = [], [], []
        for pair in pairs:
            first: Sequence[int] = pair.first
            second: Sequence[int] = pair.second
            wrong = draw.random() < 0.5
            if wrong and self.negatives == "swapped":
                first, second = second, first
            elif wrong:
                room = self.max_length - 3 - len(first)
                second = self._from_another_document(pair.document, draw)[:room]
            sequences.append([cls, *first, sep, *second, sep])
            types.append([0] * (len(first) + 2) + [1] * (len(second) + 1))
            labels.append(int(wrong))
        masked = self.masks.mask(pack_sequences(sequences, types), step)
        return {**masked, "pair_labels": torch.tensor(labels)}

    def items(self, arguments: dict[str, Any]) -> dict[str, int]:
        return {"mlm": arguments["max_labelled"], "pair": len(arguments["pair_labels"])}

    def _from_another_document(self, document: int, draw: Random) -> Sequence[int]:
        start, end = bisect_left(self._documents, document), bisect_right(self._documents, document)
        place = draw.randrange(len(self.pairs) - (end - start))
        return self.pairs[place if place < start else place + end - start].second


@dataclass(frozen=True)
class PairOutput(ModelOutput):
    """pair_logits: (pairs, 2): of a right and of a wrong pair."""

    pair_logits: Tensor | None = None


class PairMaskedLM(MaskedLM):
    """Masked LM, and a linear layer over the pooler that tells right pairs from wrong ones.

    loss = mean over the masked tokens + mean over the pairs. Its checkpoints are BertForPreTraining's.
    Raises: ValueError for another family than BERT.
    Source: Devlin et al. 2018, arXiv:1810.04805.
    """

    architecture = "ForPreTraining"
    has_pooler = True

    def __init__(self, config: EncoderConfig):
        if config.family != "bert":
            raise ValueError(
                f"only BERT's checkpoints have a head for pairs of segments, got family {config.family!r}: use a "
                "BERT model, or the masked LM alone"
            )
        super().__init__(config)
        self.pair_head = nn.Linear(config.hidden_size, 2)
        self.init_weights(self.pair_head)

    def forward(
        self,
        batch: PackedBatch,
        labels: Tensor | None = None,
        max_labelled: int | None = None,
        pair_labels: Tensor | None = None,
    ) -> PairOutput:
        """Args: labels, max_labelled as in ``MaskedLM``; pair_labels: int64 (pairs,), 1 for a wrong pair; both labels
        or neither."""
        encoded, table = self.encode(batch)
        hidden = encoded.last_hidden_state
        pair_logits = self.pair_head(encoded.pooled)
        if labels is None or pair_labels is None:
            return PairOutput(logits=self.logits(hidden, table), pair_logits=pair_logits)
        parts = {
            "mlm": LossPart(self.loss(self.labelled(hidden, labels, max_labelled), table)),
            "pair": LossPart(F.cross_entropy(pair_logits.float(), pair_labels)),
        }
        return PairOutput(loss=weighted_sum(parts), parts=parts, pair_logits=pair_logits)

    def head_names(self) -> dict[str, str]:
        return {**super().head_names(), "pair_head": "cls.seq_relationship"}


def _collator(negatives: str, tokenizer, pairs, seed: int, **masking) -> PairCollator:
    return PairCollator(MlmCollator(tokenizer, seed=seed, **masking), pairs, negatives)


NSP = Objective(PairMaskedLM, ("segment-pairs",), partial(_collator, "random"))
SOP = Objective(PairMaskedLM, ("segment-pairs",), partial(_collator, "swapped"))
