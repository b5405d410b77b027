"""Masked-LM corruption of packed ids: selection, action and replacement of each token from one Philox call.

Tiling: one program takes BLOCK tokens. The grid depends on the number of ids only.
Bytes: reads ids, writes ids and labels, 24 per token. The entries of the tables come from the cache.
Source: Devlin et al. 2018, arXiv:1810.04805; Walker 1977 (alias method, for the table of replacements).
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.run import run
from torch import Tensor

MASKED_BELOW = tl.constexpr(3435973837)  # 0.8 * 2^32, and next 0.9 * 2^32, rounded up
REPLACED_BELOW = tl.constexpr(3865470567)
# The reference's, which kernels cannot import: they import torch and Triton only.
IGNORED = tl.constexpr(-100)
OFFSET = tl.constexpr(1)  # last word of Philox's counter, where dropout has a random offset


@triton.jit(do_not_specialize=["tokens", "vocabulary", "entries", "mask_token_id", "threshold"])
def _mlm_corruption_kernel(
    ids_ptr,  # (tokens,), int64
    seed_ptr,  # (1,), int64
    special_ptr,  # (vocabulary,), bool
    choices_ptr,  # (entries, 2), int64
    cutoffs_ptr,  # (entries,), int64
    corrupted_ptr,  # (tokens,), int64
    labels_ptr,  # (tokens,), int64
    tokens,
    vocabulary,
    entries,
    mask_token_id,
    threshold,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < tokens
    ids = tl.load(ids_ptr + token, mask=mask, other=-1)
    zero = (token * 0).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(
        tl.load(seed_ptr), token.to(tl.uint32), zero, zero, zero + OFFSET, n_rounds=7
    )
    known = (ids >= 0) & (ids < vocabulary)
    special = tl.load(special_ptr + ids, mask=known, other=1) != 0
    selected = (r0.to(tl.int64) < threshold) & known & (special == 0)
    action = r1.to(tl.int64)
    masked = selected & (action < MASKED_BELOW)
    replaced = selected & (action >= MASKED_BELOW) & (action < REPLACED_BELOW)
    entry = (r2.to(tl.int64) * entries) >> 32
    cutoff = tl.load(cutoffs_ptr + entry, mask=replaced, other=0)
    second = (r3.to(tl.int64) >= cutoff).to(tl.int64)
    choice = tl.load(choices_ptr + 2 * entry + second, mask=replaced, other=0)
    corrupted = tl.where(masked, mask_token_id, tl.where(replaced, choice, ids))
    tl.store(corrupted_ptr + token, corrupted, mask=mask)
    tl.store(labels_ptr + token, tl.where(selected, ids, IGNORED), mask=mask)


def config() -> dict:
    """Launch parameters; not tuned on a device yet."""
    return {"BLOCK": 256, "num_warps": 4}


def mlm_corruption(
    input_ids: Tensor,
    seed: Tensor,
    is_special: Tensor,
    choices: Tensor,
    cutoffs: Tensor,
    mask_token_id: int,
    threshold: int,
) -> tuple[Tensor, Tensor]:
    """(corrupted ids, labels) as the op fastenc::mlm_corruption returns them."""
    input_ids, choices = input_ids.contiguous(), choices.contiguous()
    corrupted, labels = torch.empty_like(input_ids), torch.empty_like(input_ids)
    tokens, launch = input_ids.numel(), config()
    if tokens:
        run(
            _mlm_corruption_kernel,
            (triton.cdiv(tokens, launch["BLOCK"]),),
            input_ids,
            seed,
            is_special.contiguous(),
            choices,
            cutoffs.contiguous(),
            corrupted,
            labels,
            tokens,
            is_special.numel(),
            cutoffs.numel(),
            mask_token_id,
            threshold,
            **launch,
        )
    return corrupted, labels
