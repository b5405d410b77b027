"""The corruption of masked language modelling, computed on the device on which the tokens are."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fastenc._base.seeds import derive_seed
from fastenc.objectives.mlm import replacement_weights, special_mask
from fastenc.ops import mlm_corruption
from fastenc.packing import PackedBatch
from fastenc.text.special_tokens import special_tokens
from fastenc.text.tokenizer_like import TokenizerLike


class MlmCorruption(nn.Module):
    """Corrupts packed batches like :class:`fastenc.objectives.MlmCollator`, but on their device.

    The trainer uses the collator. The collator works on the host, in a thread that runs ahead of the steps, and can
    select whole words. Use this module if the tokens stay on the device between steps, or if one CUDA graph contains
    the whole step. Then the host must not wait for the device, and no shape may depend on the selected tokens; this
    module meets both. The two classes use different random numbers.

    Args:
        tokenizer: a ``tokenizers.Tokenizer`` with BERT's or RoBERTa's special tokens.
        probability: share of tokens to predict, in (0, 1).
        replacement: the distribution of random tokens, "uniform" or "unigram"; no special token is sampled.
        unigram_counts: (vocabulary,) number of occurrences of each token in the corpus, for "unigram".
    Raises: ValueError if a value is out of range, or if ``unigram_counts`` is missing or has another shape.
    Source: Devlin et al. 2018, arXiv:1810.04805.
    """

    is_special: Tensor
    choices: Tensor
    cutoffs: Tensor

    def __init__(
        self,
        tokenizer: TokenizerLike,
        *,
        probability: float = 0.15,
        replacement: str = "uniform",
        unigram_counts: Tensor | None = None,
    ):
        super().__init__()
        if not 0 < probability < 1:
            raise ValueError(f"probability must be in (0, 1), got {probability}: 0.15 is usual")
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
        """Corrupt the ids of a batch.

        Args:
            seed: int64 (1,) on the batch's device (see :meth:`step_seed`). None: the seed is sampled from the device's
                default generator, which a CUDA graph advances at each replay.
        Returns: (the batch with corrupted ids, labels: int64 (total_tokens,), -100 where not selected).
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
        """A seed that depends on (seed, step) only, so that a resumed run uses the same: int64 (1,), on the module's
        device."""
        return torch.full((1,), derive_seed(seed, step, size=8) >> 1, device=self.is_special.device)


def alias_table(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The alias table of a discrete distribution, from which a sample takes constant time.

    To sample, choose an entry uniformly and draw a uniform 32-bit number. If the number is below the entry's cutoff,
    the sample is ``choices[entry, 0]``, else ``choices[entry, 1]``. The error of a probability is about 2^-32.

    Args:
        weights: (outcomes,), not negative; they need not add up to 1.
    Returns: (choices: int64 (entries, 2), indices of positive ``weights``; cutoffs: int64 (entries,)).
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
