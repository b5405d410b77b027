"""The corruption of masked language modelling, computed on the device that holds the tokens."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastenc._seeds import derive_seed
from fastenc.models.tokenizers import special_tokens
from fastenc.objectives.mlm import replacement_weights, special_mask
from fastenc.ops import mlm_corruption
from fastenc.packing import PackedBatch


class MlmCorruption(nn.Module):
    """Corrupts packed batches like :class:`fastenc.objectives.MlmCollator`, on their device.

    The trainer uses the collator, which works on the host, in a thread beside the model, and can mask whole words.
    Use this module if the tokens stay on the device between steps, or if one CUDA graph holds the whole step:
    it reads nothing back, and no shape depends on the selected tokens. The two draw different random numbers.

    Args:
        tokenizer: a ``tokenizers.Tokenizer`` with BERT's or RoBERTa's special tokens.
        probability: share of tokens to predict.
        replacement: the distribution of random tokens, "uniform" or "unigram"; special tokens are never drawn.
        unigram_counts: (vocabulary,) occurrences of each token in the corpus, for "unigram".
    Raises: ValueError for a value out of range, or counts missing or of another size.
    Source: Devlin et al. 2018, arXiv:1810.04805.
    """

    is_special: Tensor
    choices: Tensor
    cutoffs: Tensor

    def __init__(
        self,
        tokenizer: Any,
        *,
        probability: float = 0.15,
        replacement: str = "uniform",
        unigram_counts: Tensor | None = None,
    ):
        super().__init__()
        if not 0 < probability < 1:
            raise ValueError(f"probability must be in (0, 1), got {probability}")
        self.probability = probability
        self.mask_token_id = special_tokens(tokenizer).mask
        choices, cutoffs = alias_table(replacement_weights(tokenizer, replacement, unigram_counts))
        for name, value in (
            ("is_special", special_mask(tokenizer)),
            ("choices", choices),
            ("cutoffs", cutoffs),
        ):
            self.register_buffer(name, value, persistent=False)

    def forward(self, batch: PackedBatch, seed: Tensor | None = None) -> tuple[PackedBatch, Tensor]:
        """(the batch with corrupted ids, labels int64 (total_tokens,), -100 where not selected).

        Args:
            seed: int64 (1,) on the batch's device (see :meth:`step_seed`). None draws a seed from the device's
                default generator, which a CUDA graph advances in each replay.
        """
        corrupted, labels = mlm_corruption(
            batch.input_ids,
            self.is_special,
            self.choices,
            self.cutoffs,
            self.mask_token_id,
            probability=self.probability,
            seed=seed,
        )
        return replace(batch, input_ids=corrupted), labels

    def step_seed(self, seed: int, step: int) -> Tensor:
        """A seed that depends on (seed, step) only, for runs that are resumed: int64 (1,), on the module's device."""
        return torch.full((1,), derive_seed(seed, step, size=8) >> 1, device=self.is_special.device)


def alias_table(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The alias table of a discrete distribution: (choices int64 (entries, 2), cutoffs int64 (entries,)).

    To sample, draw an entry uniformly and a uniform 32-bit number. A number below the entry's cutoff takes the first
    of its two indices into ``weights``, another number the second. Only indices of positive weight are in the table.
    The probabilities are exact to about 2^-32.
    Source: Walker 1977; Vose 1991, "A linear algorithm for generating random numbers with a given distribution".
    """
    indices = weights.nonzero().flatten()
    left = (weights[indices].double() * (len(indices) / weights.double().sum())).tolist()
    second, cutoff = list(range(len(left))), [1.0] * len(left)
    small = [entry for entry, share in enumerate(left) if share < 1]
    large = [entry for entry, share in enumerate(left) if share >= 1]
    while small and large:
        entry, donor = small.pop(), large[-1]
        cutoff[entry], second[entry] = left[entry], donor
        left[donor] -= 1 - left[entry]
        if left[donor] < 1:
            small.append(large.pop())
    choices = torch.stack([indices, indices[torch.tensor(second)]], 1)
    return choices, (torch.tensor(cutoff, dtype=torch.float64) * 2**32).round().long()
