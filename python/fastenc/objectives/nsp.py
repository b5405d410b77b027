"""Masked LM with a second objective on pairs of segments: next-sentence or sentence-order prediction."""

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

from fastenc._base.seeds import derive_seed
from fastenc.data import SegmentPair, StoredExamples
from fastenc.models import EncoderConfig, LossTerm, MaskedLM, ModelOutput
from fastenc.objectives.base import Objective
from fastenc.objectives.loss_terms import weighted_sum
from fastenc.objectives.mlm import MlmCollator
from fastenc.packing import ModelArguments, PackedBatch, pack_sequences

NEGATIVES = ("random", "swapped")
# Number of segments among which a negative is searched. With blocks of 512 tokens, about four of them have each length.
CANDIDATES = 2048


class PairCollator:
    """Packs [CLS] A [SEP] B [SEP] with token types 0 and 1, makes half of the pairs negative, and masks tokens.

    The random numbers depend on (seed, step) only.

    Args:
        mlm_collator: masks the pairs' tokens; its seed is used for the pairs too.
        pairs: the pairs from which random segments are taken.
        negatives: what a negative pair is.
            "random" (next-sentence prediction): B is replaced by the second segment of a pair from another document.
            Document and segment have the same language and length, which thus do not reveal the label
            (:class:`OtherSegments`).
            "swapped" (sentence-order prediction): A and B are exchanged.
    Raises: ValueError for another value of ``negatives``, and for "random" if all pairs come from one document.
    Source: Devlin et al. 2018, arXiv:1810.04805 (next sentence); Lan et al. 2019, arXiv:1909.11942 (order). BERT's
        code instead fills negative pairs from a random document up to the wanted length.
    """

    def __init__(
        self, mlm_collator: MlmCollator, pairs: Sequence[SegmentPair], negatives: str = "random"
    ):
        if negatives not in NEGATIVES:
            raise ValueError(
                f"negatives must be one of {NEGATIVES}, got {negatives!r}: give one of them"
            )
        self.mlm_collator = mlm_collator
        self.others = OtherSegments(pairs) if negatives == "random" else None

    def __call__(self, pairs: Sequence[SegmentPair], step: int) -> ModelArguments:
        """The model's arguments.

        Returns: {"batch", "labels" and "max_labels" as ``MlmCollator`` makes them,
            "pair_labels": int64 (pairs,), 1 for a negative pair}.
        """
        rng = Random(derive_seed(self.mlm_collator.seed, step, "pairs"))
        cls, sep = self.mlm_collator.special.cls, self.mlm_collator.special.sep
        sequences, types, labels = [], [], []
        for pair in pairs:
            first: Sequence[int] = pair.first
            second: Sequence[int] = pair.second
            is_negative = rng.random() < 0.5
            if is_negative and self.others is None:
                first, second = second, first
            elif is_negative and self.others is not None:
                second = self.others.sample(pair.document, len(second), rng)
            sequences.append([cls, *first, sep, *second, sep])
            types.append([0] * (len(first) + 2) + [1] * (len(second) + 1))
            labels.append(int(is_negative))
        masked = self.mlm_collator.mask(pack_sequences(sequences, types), step)
        return {**masked, "pair_labels": torch.tensor(labels)}

    def items(self, arguments: ModelArguments) -> dict[str, int]:
        """Number of items that each term is a mean over, see :func:`fastenc.objectives.loss_terms.count_items`."""
        return {"mlm": arguments["max_labels"], "pair": len(arguments["pair_labels"])}


class OtherSegments:
    """Samples second segments of other documents, by length.

    The segments begin and end at sentence boundaries and have the wanted length, like those of positive pairs. The
    model could recognise negatives by a cut sentence or by another length.

    Args:
        pairs: the examples of a token store, which know their languages and stay on disk, or a list of pairs of one
            language.
    Raises: ValueError if all pairs come from one document.
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
                "next-sentence prediction needs pairs of at least two documents, got pairs of one: give more documents "
                "(an empty line separates them in a text file), or predict the order (mlm+sop)"
            )

    def sample(self, document: int, length: int, rng: Random) -> Sequence[int]:
        """A segment of ``length`` tokens from another document of the same language.

        ``CANDIDATES`` neighbouring segments from a random index are searched. The result is a random one of those with
        this length. If there is none, it is the shortest longer one, cut to the length. If there is none either, it is
        the longest. If the language has a single document, other languages are used.
        """
        start, end = bisect_left(self._documents, document), bisect_right(self._documents, document)
        number = bisect_right(self._bounds, start)
        first, last = self._bounds[number - 1 : number + 1]
        if end - start == last - first:
            first, last = 0, len(self.pairs)
        others = last - first - (end - start)
        begin = rng.randrange(others)
        candidates = first + torch.arange(begin, begin + min(CANDIDATES, others))
        candidates -= others * (candidates >= first + others)  # wrap around
        candidates += (end - start) * (candidates >= start)  # skip the document itself
        excess = self._lengths(candidates) - length
        cost = torch.where(excess >= 0, excess, excess.max() - excess)
        best = candidates[cost == cost.min()]
        return self.pairs[int(best[rng.randrange(len(best))])].second[:length]


@dataclass(frozen=True)
class PairOutput(ModelOutput):
    """Output of :class:`PairMaskedLM`.

    Fields:
        pair_logits: (pairs, 2), of the classes positive (0) and negative (1).
    """

    pair_logits: Tensor | None = None


class PairMaskedLM(MaskedLM):
    """Masked LM with a linear classifier of positive and negative pairs on the pooler's output.

        loss = mean over the masked tokens + mean over the pairs

    Its checkpoints are those of transformers' BertForPreTraining and of the same class of other families. ALBERT
    applies dropout with ``classifier_dropout_p`` to the pooler's output, the others do not.
    Raises: ValueError for a family without a head for pairs of segments.
    Source: Devlin et al. 2018, arXiv:1810.04805; Lan et al. 2019, arXiv:1909.11942.
    """

    architecture = "ForPreTraining"
    has_pooler = True

    def __init__(self, config: EncoderConfig):
        if config.architecture.pair_head is None:
            raise ValueError(
                "the family must be one whose checkpoints have a head for pairs of segments, such as bert or albert, "
                f"got {config.family!r}: use one of these, or the objective mlm"
            )
        super().__init__(config)
        self.pair_head = nn.Linear(config.hidden_size, 2)
        # The pair heads of the others have no dropout.
        self.pair_dropout_p = (
            (config.classifier_dropout_p or 0.0) if config.family == "albert" else 0.0
        )
        self.init_weights(self.pair_head)

    def forward(
        self,
        batch: PackedBatch,
        labels: Tensor | None = None,
        max_labels: int | None = None,
        pair_labels: Tensor | None = None,
    ) -> PairOutput:
        """Predict masked tokens and classify pairs.

        Args:
            labels, max_labels: as in ``MaskedLM``.
            pair_labels: int64 (pairs,), 1 for a negative pair.
        Returns: the loss, its terms and ``pair_logits``; if labels or pair_labels is None, the logits and
            ``pair_logits``.
        """
        if labels is None or pair_labels is None:
            encoded, table = self.encode(batch)
            logits = self.logits(encoded.last_hidden_state, table)
            return PairOutput(logits=logits, pair_logits=self._pair_logits(encoded.pooled))
        rows, table, pooled = self.encode_labelled(batch, labels, max_labels)
        pair_logits = self._pair_logits(pooled)
        terms = {
            "mlm": LossTerm(self.loss(rows, table)),
            "pair": LossTerm(F.cross_entropy(pair_logits.float(), pair_labels)),
        }
        return PairOutput(loss=weighted_sum(terms), terms=terms, pair_logits=pair_logits)

    def _pair_logits(self, pooled: Tensor | None) -> Tensor:
        assert pooled is not None  # has_pooler
        return self.pair_head(F.dropout(pooled, self.pair_dropout_p, self.training))

    def head_names(self) -> dict[str, str]:
        name = self.config.architecture.pair_head
        assert name is not None  # __init__ checks it
        return {**super().head_names(), "pair_head": name}


def _collator(negatives: str, tokenizer, pairs, seed: int, **masking) -> PairCollator:
    return PairCollator(MlmCollator(tokenizer, seed=seed, **masking), pairs, negatives)


NSP = Objective(PairMaskedLM, ("segment-pairs",), partial(_collator, "random"))
SOP = Objective(PairMaskedLM, ("segment-pairs",), partial(_collator, "swapped"))
