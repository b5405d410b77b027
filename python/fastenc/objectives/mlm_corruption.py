"""Masked language modelling's corruption on the device that holds the tokens."""

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
    """Corrupts packed batches as :class:`fastenc.objectives.MlmCollator` does, on their device.

    The collator is the default: it works in the data loader's processes, beside the model, selects whole words if asked
    to, and draws its own stream of numbers from (seed, step). Take this module where tokens stay on the device from
    step to step (a data set that fits there, several epochs over one batch), or where the whole step is one CUDA graph:
    nothing is read back, and no shape depends on what is selected.

    Args:
        tokenizer: a ``tokenizers.Tokenizer`` with BERT's or RoBERTa's special tokens.
        probability: share of tokens to predict.
        replacement: random tokens are drawn "uniform"ly, or by "unigram" frequency; never a special token.
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
            seed: int64 (1,) on the batch's device, such as :meth:`step_seed` makes; None draws one from the device's
                default generator, which a CUDA graph advances by itself.
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
        """The seed of one step of a run that can be resumed: int64 (1,), on the module's device."""
        return torch.full((1,), derive_seed(seed, step, size=8) >> 1, device=self.is_special.device)


def alias_table(weights: Tensor) -> tuple[Tensor, Tensor]:
    """(choices int64 (entries, 2), cutoffs int64 (entries,)): draws in proportion to ``weights`` from two numbers.

    An entry, drawn uniformly, holds two places of weights; a uniform 32-bit number below its cutoff takes the first.
    Only places of positive weight are ever drawn; shares are exact to about 2^-32.
    Source: Walker 1977; Vose 1991, "A linear algorithm for generating random numbers with a given distribution".
    """
    places = weights.nonzero().flatten()
    left = (weights[places].double() * (len(places) / weights.double().sum())).tolist()
    second, cutoff = list(range(len(left))), [1.0] * len(left)
    small = [entry for entry, share in enumerate(left) if share < 1]
    large = [entry for entry, share in enumerate(left) if share >= 1]
    while small and large:
        entry, donor = small.pop(), large[-1]
        cutoff[entry], second[entry] = left[entry], donor
        left[donor] -= 1 - left[entry]
        if left[donor] < 1:
            small.append(large.pop())
    choices = torch.stack([places, places[torch.tensor(second)]], 1)
    return choices, (torch.tensor(cutoff, dtype=torch.float64) * 2**32).round().long()
