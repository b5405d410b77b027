"""Masked LM with a second task over pairs of segments: next-sentence or sentence-order prediction."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastenc._seeds import derive_seed
from fastenc.data import SegmentPair, StoredExamples
from fastenc.models import EncoderConfig, LossPart, MaskedLM, ModelOutput
from fastenc.objectives.base import Objective
from fastenc.objectives.mlm import MlmCollator
from fastenc.objectives.parts import weighted_sum
from fastenc.packing import PackedBatch, pack_sequences

NEGATIVES = ("random", "swapped")
# Segments looked through for one of the right length: at blocks of 512 about four of each length.
WINDOW = 2048


class PairCollator:
    """Packs [CLS] A [SEP] B [SEP] with token types 0 and 1; every other pair, by chance, is a wrong one. Then masks.

    A wrong pair has the second segment of a pair of another document ("random": next-sentence prediction), or its own
    two segments in the other order ("swapped": sentence-order prediction). The other document is of the same
    language, and its segment as long as the pair's own, so that neither tells the label; see ``OtherSegments``.
    Everything is drawn anew at every call, from (seed, step) alone.

    Args:
        masks: masks the pairs' tokens; its seed is the collator's.
        pairs: the pairs that random segments are taken from.
    Raises: ValueError when random segments would have to come from the only document.
    Source: Devlin et al. 2018, arXiv:1810.04805 (next sentence); Lan et al. 2019, arXiv:1909.11942 (order). BERT's
        own code continues a random document up to the length that it wants of a pair, right or wrong.
    """

    def __init__(self, masks: MlmCollator, pairs: Sequence[SegmentPair], negatives: str = "random"):
        if negatives not in NEGATIVES:
            raise ValueError(f"negatives must be one of {NEGATIVES}, got {negatives!r}")
        self.masks = masks
        self.others = OtherSegments(pairs) if negatives == "random" else None

    def __call__(self, pairs: Sequence[SegmentPair], step: int) -> dict[str, Any]:
        """What ``MlmCollator`` gives, and "pair_labels": int64 (pairs,), 1 for a wrong pair."""
        draw = Random(derive_seed(self.masks.seed, step, "pairs"))
        cls, sep = self.masks.special.cls, self.masks.special.sep
        sequences, types, labels = [], [], []
        for pair in pairs:
            first: Sequence[int] = pair.first
            second: Sequence[int] = pair.second
            wrong = draw.random() < 0.5
            if wrong and self.others is None:
                first, second = second, first
            elif wrong and self.others is not None:
                second = self.others.draw(pair.document, len(second), draw)
            sequences.append([cls, *first, sep, *second, sep])
            types.append([0] * (len(first) + 2) + [1] * (len(second) + 1))
            labels.append(int(wrong))
        masked = self.masks.mask(pack_sequences(sequences, types), step)
        return {**masked, "pair_labels": torch.tensor(labels)}

    def items(self, arguments: dict[str, Any]) -> dict[str, int]:
        return {"mlm": arguments["max_labelled"], "pair": len(arguments["pair_labels"])}


class OtherSegments:
    """The pairs' second segments, to be drawn by length.

    As every right pair's, they begin and end where a sentence does. Were they cut to a length, or of any length, the
    label could be read from it: right pairs are as long as whole sentences allow.

    Args: pairs: a store's, which know their languages and stay on the disk, or pairs of one language.
    Raises: ValueError for pairs of one document.
    """

    def __init__(self, pairs: Sequence[SegmentPair]):
        if isinstance(pairs, StoredExamples):
            self.pairs: Sequence[SegmentPair] = pairs
            self._documents: Any = pairs.documents  # a list or an array
            self._lengths: Callable[[Tensor], Tensor] = pairs.second_lengths
            self._bounds = [0, *accumulate(pairs.languages.values())]
        else:
            self.pairs = sorted(pairs, key=lambda pair: pair.document)
            self._documents = [pair.document for pair in self.pairs]
            lengths = torch.tensor([len(pair.ids) - pair.split - 2 for pair in self.pairs])
            self._lengths = lengths.__getitem__
            self._bounds = [0, len(self.pairs)]
        if self._documents[0] == self._documents[-1]:
            raise ValueError(
                "next-sentence prediction takes its wrong segments from another document, got pairs of one "
                "document: give more documents (an empty line separates them in a text file), or predict the order"
            )

    def draw(self, document: int, length: int, draw: Random) -> Sequence[int]:
        """One of ``length`` tokens, from another document than this, of its language.

        It is taken from ``WINDOW`` neighbouring segments at a random place: at random from those of this length, or
        else the shortest of the longer ones, cut to the length, or else the longest. Where a language has but one
        document, the others' segments serve.
        """
        start, end = bisect_left(self._documents, document), bisect_right(self._documents, document)
        number = bisect_right(self._bounds, start)
        first, last = self._bounds[number - 1 : number + 1]
        if end - start == last - first:
            first, last = 0, len(self.pairs)
        others = last - first - (end - start)
        begin = draw.randrange(others)
        places = first + torch.arange(begin, begin + min(WINDOW, others))
        places -= others * (places >= first + others)
        places += (end - start) * (places >= start)
        excess = self._lengths(places) - length
        cost = torch.where(excess >= 0, excess, excess.max() - excess)
        best = places[cost == cost.min()]
        return self.pairs[int(best[draw.randrange(len(best))])].second[:length]


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
