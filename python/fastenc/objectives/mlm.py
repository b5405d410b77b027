"""Masked language modelling: selects tokens to predict and replaces them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastenc._base.seeds import derive_seed
from fastenc.data.word_starts import WordStarts
from fastenc.models import MaskedLM
from fastenc.objectives.base import Objective
from fastenc.ops.labelled import IGNORED
from fastenc.packing import ModelArguments, PackedBatch, pack_sequences
from fastenc.text.special_tokens import special_tokens
from fastenc.text.tokenizer_like import TokenizerLike

REPLACEMENTS = ("uniform", "unigram")


class MlmCollator:
    """Packs token sequences and corrupts them, with new random numbers in each step (dynamic masking).

    Each token that is not special is selected with ``probability``. The model has to predict the selected tokens.
    A selected token becomes the mask token (80 %) or a random token (10 %), or is not changed (10 %).

    The random numbers depend on (seed, step) only, so a resumed run sees the same batches as an uninterrupted one.
    With ``static`` they depend on (seed, the sequence's tokens), and each epoch masks the same tokens.

    :class:`fastenc.objectives.MlmCorruption` does the same on the device, but cannot select whole words.

    Args:
        tokenizer: a ``tokenizers.Tokenizer`` with BERT's or RoBERTa's special tokens.
        probability: share of tokens to predict, in (0, 1).
        replacement: the distribution of random tokens, "uniform" or "unigram"; no special token is sampled.
        unigram_counts: (vocabulary,) number of occurrences of each token in the corpus, for "unigram".
        whole_word: select whole words (:class:`fastenc.data.word_starts.WordStarts`) instead of single tokens.
        static: mask the same tokens of a sequence in every epoch.
        mask_share, random_share: shares of the selected tokens that become the mask token or a random token.
        seed: seed of all random numbers.
    Raises: ValueError if a value is out of range, if ``unigram_counts`` is missing or has another shape, or if the
        vocabulary has special tokens only.
    Source: Devlin et al. 2018, arXiv:1810.04805; dynamic masking: Liu et al. 2019, arXiv:1907.11692; whole words:
        the README of BERT's repository, May 2019.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        *,
        probability: float = 0.15,
        replacement: str = "uniform",
        unigram_counts: Tensor | None = None,
        whole_word: bool = False,
        static: bool = False,
        mask_share: float = 0.8,
        random_share: float = 0.1,
        seed: int = 0,
    ):
        if not 0 < probability < 1:
            raise ValueError(f"probability must be in (0, 1), got {probability}: 0.15 is usual")
        if min(mask_share, random_share) < 0 or mask_share + random_share > 1:
            raise ValueError(
                "mask_share and random_share must be at least 0 and together at most 1, got "
                f"{mask_share} and {random_share}: 0.8 and 0.1 are usual"
            )
        self.probability, self.static, self.seed = probability, static, seed
        self.mask_share, self.random_share = mask_share, random_share
        self.special = special_tokens(tokenizer)
        self.mask_id = self.special.mask
        cumulative = replacement_weights(tokenizer, replacement, unigram_counts).cumsum(0)
        self.is_special = special_mask(tokenizer)
        # The last value is exactly 1, above every sample.
        self._cumulative = cumulative / cumulative[-1]
        self.word_starts = WordStarts(tokenizer, self.is_special) if whole_word else None

    def __call__(self, sequences: Sequence[Sequence[int]], step: int) -> ModelArguments:
        """The model's arguments.

        Returns: {"batch": PackedBatch of corrupted ids,
            "labels": int64 (total_tokens,), -100 where not selected,
            "max_labels": number of selected tokens}.
        """
        return self.mask(pack_sequences(sequences), step)

    def mask(self, batch: PackedBatch, step: int) -> ModelArguments:
        """Like ``__call__``, but for a batch that is already packed."""
        if self.static:
            sequences = batch.input_ids.split(batch.cu_seqlens.diff().tolist())
            results = [self.corrupt(ids, str(ids.tolist())) for ids in sequences]
            corrupted, labels = map(torch.cat, zip(*results, strict=True))
        else:
            corrupted, labels = self.corrupt(batch.input_ids, step)
        return {
            "batch": replace(batch, input_ids=corrupted),
            "labels": labels,
            "max_labels": int((labels != IGNORED).sum()),
        }

    def corrupt(self, ids: Tensor, key: int | str) -> tuple[Tensor, Tensor]:
        """Corrupt int64 ids (total_tokens,). The random numbers depend on the seed and ``key`` only.

        Returns: (corrupted ids, labels), each int64 (total_tokens,).
        """
        generator = torch.Generator().manual_seed(derive_seed(self.seed, key))
        uniform = lambda: torch.rand(ids.shape, generator=generator, dtype=torch.float64)
        selection = uniform()
        if self.word_starts is not None:
            # All tokens of a word use the sample of the word's first token.
            first = self.word_starts(ids)
            selection = selection[first][first.long().cumsum(0) - 1]
        selected = ~self.is_special[ids] & (selection < self.probability)
        labels = torch.where(selected, ids, IGNORED)
        return self.replace(ids, selected, uniform(), uniform()), labels

    def replace(
        self, ids: Tensor, selected: Tensor, action_samples: Tensor, token_samples: Tensor
    ) -> Tensor:
        """The ids after the selected ones are replaced: int64 (total_tokens,).

        Args:
            ids: int64 (total_tokens,).
            selected: bool (total_tokens,).
            action_samples: float64 (total_tokens,), uniform in [0, 1). They decide between the mask token, a random
                token and no change.
            token_samples: float64 (total_tokens,), uniform in [0, 1). They decide which random token is taken.
        """
        random_ids = torch.searchsorted(self._cumulative, token_samples, right=True)
        becomes_mask = action_samples < self.mask_share
        becomes_random = ~becomes_mask & (action_samples < self.mask_share + self.random_share)
        corrupted = torch.where(selected & becomes_mask, self.mask_id, ids)
        return torch.where(selected & becomes_random, random_ids, corrupted)


def replacement_weights(
    tokenizer: TokenizerLike, replacement: str, unigram_counts: Tensor | None
) -> Tensor:
    """The unnormalised distribution of random tokens: float64 (vocabulary,), 0 for special tokens.

    Args:
        replacement: "uniform" or "unigram".
        unigram_counts: (vocabulary,) number of occurrences of each token, for "unigram".
    Raises: ValueError for an unknown ``replacement``, and if ``unigram_counts`` is missing, has another shape, has a
        negative count, or is 0 for all tokens that are not special.
    """
    if replacement not in REPLACEMENTS:
        raise ValueError(
            f"replacement must be one of {REPLACEMENTS}, got {replacement!r}: give one of them"
        )
    vocabulary = tokenizer.get_vocab_size()
    if replacement == "unigram":
        if unigram_counts is None or unigram_counts.shape != (vocabulary,):
            raise ValueError(
                f"unigram_counts must have shape ({vocabulary},), one count for each token, got "
                f"{None if unigram_counts is None else tuple(unigram_counts.shape)}: count_tokens makes it"
            )
        weights = unigram_counts.to("cpu", torch.float64, copy=True)
    else:
        weights = torch.ones(vocabulary, dtype=torch.float64)
    weights[special_mask(tokenizer)] = 0
    if not (weights >= 0).all() or not 0 < weights.sum() < torch.inf:
        raise ValueError(
            "unigram_counts must be at least 0, and positive for some token that is not special, got a minimum of "
            f"{weights.min():g} and a sum of {weights.sum():g} over these tokens: count the tokens of the corpus"
        )
    return weights


def special_mask(tokenizer: TokenizerLike) -> Tensor:
    """Whether each token id is a special token: bool (vocabulary,).

    Raises: ValueError if the vocabulary has special tokens only.
    """
    vocabulary, special = tokenizer.get_vocab_size(), special_tokens(tokenizer).all
    if vocabulary <= len(special) or max(special) >= vocabulary:
        raise ValueError(
            f"the vocabulary must hold tokens beside its special ones, with ids from 0 on, got {vocabulary} tokens, "
            f"special ones up to id {max(special)}: train or load a larger tokenizer"
        )
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[list(special)] = True
    return mask


def count_tokens(sequences: Iterable[Sequence[int]], vocabulary: int) -> Tensor:
    """Number of occurrences of each token id in the sequences: int64 (vocabulary,).

    Args:
        vocabulary: number of tokens of the tokenizer.
    """
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for sequence in sequences:
        counts += torch.bincount(torch.tensor(sequence), minlength=vocabulary)
    return counts


MLM = Objective(
    model=MaskedLM,
    packings=("full-sentences", "doc-sentences"),
    collator=lambda tokenizer, blocks, seed, **masking: MlmCollator(
        tokenizer, seed=seed, **masking
    ),
)
