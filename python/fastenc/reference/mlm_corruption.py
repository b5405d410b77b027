"""Masked-LM corruption in plain torch. It computes with integers only, so that kernels return exactly the same.

Source: Devlin et al. 2018, arXiv:1810.04805; Walker 1977, "An efficient method for generating discrete random
variables with general distributions" (alias method), for the table of replacements.
"""

import torch
from torch import Tensor

from fastenc.reference.dropout import philox
from fastenc.reference.masked_cross_entropy import IGNORED

MASKED_BELOW = 3435973837  # 0.8 * 2^32, and next 0.9 * 2^32, rounded up
REPLACED_BELOW = 3865470567
OFFSET = 1  # last word of Philox's counter, where dropout has a random offset


def mlm_corruption(
    input_ids: Tensor,
    seed: Tensor,
    is_special: Tensor,
    choices: Tensor,
    cutoffs: Tensor,
    mask_token_id: int,
    threshold: int,
) -> tuple[Tensor, Tensor]:
    """(corrupted ids, labels), int64 (total_tokens,); arguments as in fastenc.ops.mlm_corruption.

    ``threshold`` is the probability of selection times 2^32.
    """
    token = torch.arange(len(input_ids), device=input_ids.device)
    zero = torch.zeros_like(token)
    select, action, entry_bits, side = philox(seed, token, zero, zero, zero + OFFSET)
    selected = (select < threshold) & ~is_special[input_ids]
    entry = (entry_bits * len(cutoffs)) >> 32
    replacement = choices[entry, (side >= cutoffs[entry]).long()]
    corrupted = torch.where(selected & (action < MASKED_BELOW), mask_token_id, input_ids)
    replaced = selected & (action >= MASKED_BELOW) & (action < REPLACED_BELOW)
    corrupted = torch.where(replaced, replacement, corrupted)
    return corrupted, torch.where(selected, input_ids, IGNORED)
