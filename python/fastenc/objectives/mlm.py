"""Masked language modelling: which tokens are hidden, and what stands in their place."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastenc.data.tokenizers import special_tokens
from fastenc.packing import pack_sequences

IGNORED = -100
REPLACEMENTS = ("uniform", "unigram")


class MlmCollator:
    """Packs token sequences and corrupts them anew at every call (dynamic masking).

    Of the tokens that are not special, each is selected with ``probability``; a selected token becomes the mask
    token (80 %), a random one (10 %), or stays (10 %), and is to be predicted. The choice is a function of (seed,
    step) alone, so that a resumed run sees the batches that the interrupted one would have seen.
    :class:`fastenc.objectives.MlmCorruption` does the same on the device, without whole words.

    Args:
        tokenizer: a ``tokenizers.Tokenizer`` with BERT's or RoBERTa's special tokens.
        probability: share of tokens to predict.
        replacement: random tokens are drawn "uniform"ly, or by "unigram" frequency; never a special token.
        unigram_counts: (vocabulary,) occurrences of each token in the corpus, for "unigram".
        whole_word: select words, with all of their tokens ("##x" of WordPiece; "Ġx" and "▁x" begin a word).
    Raises: ValueError for a value out of range, or counts missing or of another size.
    Source: Devlin et al. 2018, arXiv:1810.04805; dynamic masking, Liu et al. 2019, arXiv:1907.11692; whole words,
        the note of May 2019 in BERT's own repository.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        probability: float = 0.15,
        replacement: str = "uniform",
        unigram_counts: Tensor | None = None,
        whole_word: bool = False,
        seed: int = 0,
    ):
        if not 0 < probability < 1:
            raise ValueError(f"probability must be in (0, 1), got {probability}")
        self.probability, self.seed = probability, seed
        self.special = special_tokens(tokenizer)
        cumulative = replacement_weights(tokenizer, replacement, unigram_counts).cumsum(0)
        self._is_special = special_mask(tokenizer)
        self._cumulative = cumulative / cumulative[-1]  # ends in exactly 1, above every draw
        self._begins_word = _word_starts(tokenizer) if whole_word else None

    def __call__(self, sequences: Sequence[Sequence[int]], step: int) -> dict[str, Any]:
        """{"batch": PackedBatch of corrupted ids, "labels": int64 (total_tokens,), -100 where not selected,
        "max_labelled": how many are selected}."""
        batch = pack_sequences(sequences)
        corrupted, labels = self.corrupt(batch.input_ids, step)
        batch.input_ids.copy_(corrupted)
        return {
            "batch": batch,
            "labels": labels,
            "max_labelled": int((labels != IGNORED).sum()),
        }

    def corrupt(self, ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """(corrupted ids, labels), each (total_tokens,), for the given step's random numbers."""
        generator = torch.Generator().manual_seed(mix(self.seed, step, 4))
        draw = lambda: torch.rand(ids.shape, generator=generator, dtype=torch.float64)
        selectable = ~self._is_special[ids]
        chance = draw()
        if self._begins_word is not None:
            # Every token takes the draw of its word's first token.
            first = self._begins_word[ids] | ~selectable
            if first.numel():
                first[0] = True
            chance = chance[first][first.long().cumsum(0) - 1]
        selected = selectable & (chance < self.probability)
        labels = torch.where(selected, ids, IGNORED)
        fate = draw()
        random_ids = torch.searchsorted(self._cumulative, draw(), right=True)
        corrupted = torch.where(selected & (fate < 0.8), self.special.mask, ids)
        corrupted = torch.where(selected & (fate >= 0.8) & (fate < 0.9), random_ids, corrupted)
        return corrupted, labels


def replacement_weights(tokenizer: Any, replacement: str, unigram_counts: Tensor | None) -> Tensor:
    """float64 (vocabulary,): in proportion to which tokens are drawn as replacements, 0 for special ones.

    Raises: ValueError for an unknown name, or counts missing, of another size or without a token to draw.
    """
    if replacement not in REPLACEMENTS:
        raise ValueError(f"replacement must be one of {REPLACEMENTS}, got {replacement!r}")
    vocabulary = tokenizer.get_vocab_size()
    if replacement == "unigram":
        if unigram_counts is None or unigram_counts.shape != (vocabulary,):
            raise ValueError(
                f"unigram_counts must have shape ({vocabulary},), one count a token, got "
                f"{None if unigram_counts is None else tuple(unigram_counts.shape)}: see count_tokens"
            )
        weights = unigram_counts.to("cpu", torch.float64, copy=True)
    else:
        weights = torch.ones(vocabulary, dtype=torch.float64)
    weights[special_mask(tokenizer)] = 0
    if not (weights >= 0).all() or not 0 < weights.sum() < torch.inf:
        raise ValueError(
            "unigram_counts must be at least 0, and above it for some token that is not special: "
            "count the corpus's own tokens"
        )
    return weights


def special_mask(tokenizer: Any) -> Tensor:
    """bool (vocabulary,): whether a token is special."""
    mask = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.bool)
    mask[list(special_tokens(tokenizer).all)] = True
    return mask


def count_tokens(sequences: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """Occurrences of each token: int64 (vocabulary,)."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for sequence in sequences:
        counts += torch.bincount(torch.tensor(sequence), minlength=vocabulary)
    return counts


def mix(seed: int, step: int, size: int) -> int:
    """A hash of both numbers in ``size`` bytes; of a seed torch's CPU generator uses 4.

    Sums such as seed + step would give runs with neighbouring seeds the same masks, shifted.
    """
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=size).digest()
    return int.from_bytes(digest, "little")


def _word_starts(tokenizer: Any) -> Tensor:
    """bool (vocabulary,): whether a token begins a word."""
    pieces = [tokenizer.id_to_token(place) or "" for place in range(tokenizer.get_vocab_size())]
    # By the model and not the pieces: "##" is also a piece of many BPE vocabularies.
    if type(tokenizer.model).__name__ == "WordPiece":
        return torch.tensor([not piece.startswith("##") for piece in pieces])
    starts = torch.tensor([piece.startswith(("Ġ", "▁")) for piece in pieces])
    if not starts.any():
        raise ValueError(
            "whole_word needs a vocabulary that marks words (## of WordPiece, Ġ of byte-level BPE, ▁ of "
            f"Unigram), got a {type(tokenizer.model).__name__} without: set whole_word=False"
        )
    return starts
