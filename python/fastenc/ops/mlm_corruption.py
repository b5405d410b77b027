"""Masked-LM corruption of packed ids, on their device."""

from typing import Any

import torch
from torch import Tensor

from fastenc._base import debug
from fastenc.ops import checks
from fastenc.ops.cases import Draw, Size, declare_case
from fastenc.ops.dispatch import choose, declare
from fastenc.ops.library import define
from fastenc.reference import mlm_corruption as reference

declare("mlm_corruption", "triton", dtypes=(torch.int64,))


def mlm_corruption(
    input_ids: Tensor,
    is_special: Tensor,
    choices: Tensor,
    cutoffs: Tensor,
    mask_token_id: int,
    *,
    probability: float = 0.15,
    seed: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Select tokens to predict. Mask 80 % of them, replace 10 % by random tokens and keep 10 %.

    r0 to r3 of token t are the outputs of Philox4x32-7 for the counter (t, 0, 0, 1) and the key ``seed``:

        selected    = r0 < probability * 2^32  and not is_special[id]
        action      = mask if r1 < 0.8 * 2^32, else replace if r1 < 0.9 * 2^32, else keep
        k           = r2 * entries >> 32
        replacement = choices[k, 0] if r3 < cutoffs[k] else choices[k, 1]

    :class:`fastenc.objectives.MlmCorruption` makes is_special, choices and cutoffs from a tokenizer.

    Args:
        input_ids: int64 (total_tokens,), in [0, vocabulary).
        is_special: bool (vocabulary,), tokens that are never selected.
        choices, cutoffs: int64 (entries, 2) and (entries,), an alias table of the replacements; cutoffs in [0, 2^32].
        mask_token_id: the id that a masked token gets.
        probability: of selection, in (0, 1), rounded to a multiple of 2^-32.
        seed: int64 (1,) on the ids' device. None: random, from the device's default generator.
        impl: "auto", "triton" or "reference".
    Returns: (corrupted ids, labels), int64 (total_tokens,); labels hold the id of a selected token, -100 elsewhere.
    Raises: ValueError stating rule, received value, remedy.
    Numerics: integers; the same seed gives the same result in every implementation.
    Synchronisation: none; shapes do not depend on the selection.
    Source: Devlin et al. 2018, arXiv:1810.04805; Walker 1977 (alias method).
    """
    if input_ids.dtype != torch.int64 or input_ids.dim() != 1:
        raise ValueError(
            "mlm_corruption: input_ids must be int64 of shape (total_tokens,), "
            f"got {input_ids.dtype} of shape {tuple(input_ids.shape)}: pack the sequences first"
        )
    if not 0 < probability < 1:
        raise ValueError(f"mlm_corruption: probability must be in (0, 1), got {probability}")
    entries = cutoffs.shape[0] if cutoffs.dim() else 0
    if seed is None:
        seed = torch.randint(2**62, (1,), device=input_ids.device)
    for name, value, dtype, shape in (
        ("is_special", is_special, torch.bool, is_special.shape[:1]),
        ("choices", choices, torch.int64, (entries, 2)),
        ("cutoffs", cutoffs, torch.int64, (max(1, entries),)),
        ("seed", seed, torch.int64, (1,)),
    ):
        if value.dtype != dtype or tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"mlm_corruption: {name} must be {dtype} of shape {tuple(shape)}, got {value.dtype} of shape "
                f"{tuple(value.shape)}: see fastenc.objectives.MlmCorruption"
            )
        checks.check_device("mlm_corruption", name, value, input_ids)
    vocabulary = is_special.shape[0]
    if not 0 <= mask_token_id < vocabulary:
        raise ValueError(
            f"mlm_corruption: mask_token_id must be in [0, {vocabulary}), the size of is_special, got {mask_token_id}"
        )
    _check_range(
        "input_ids",
        input_ids,
        vocabulary,
        "is_special has one entry for each token of the vocabulary: was another tokenizer used?",
    )
    remedy = "see fastenc.objectives.MlmCorruption"
    _check_range("choices", choices, vocabulary, remedy)
    _check_range("cutoffs", cutoffs, 2**32 + 1, remedy)
    tables = (seed, is_special, choices, cutoffs)
    threshold = round(probability * 2**32)
    if choose("mlm_corruption", impl, input_ids) == "reference":
        return reference.mlm_corruption(input_ids, *tables, mask_token_id, threshold)
    return torch.ops.fastenc.mlm_corruption(input_ids, *tables, mask_token_id, threshold)


def _check_range(name: str, values: Tensor, limit: int, remedy: str) -> None:
    """Raise ValueError for values outside [0, limit), where ``debug.may_read`` allows it."""
    if not debug.may_read(values) or not len(values):
        return
    low, high = (int(value) for value in values.aminmax())
    if low < 0 or high >= limit:
        raise ValueError(
            f"mlm_corruption: {name} must be in [0, {limit}), got {low if low < 0 else high}: {remedy}"
        )


define(
    "mlm_corruption(Tensor input_ids, Tensor seed, Tensor is_special, Tensor choices, Tensor cutoffs, "
    "int mask_token_id, int threshold) -> (Tensor, Tensor)",
    lambda input_ids, *_: (torch.empty_like(input_ids), torch.empty_like(input_ids)),
    triton="mlm_corruption.mlm_corruption",
)


def _case_inputs(size: Size, draw: Draw) -> dict[str, Any]:
    vocabulary, entries = size.vocabulary, max(size.vocabulary - 5, 1)
    return {
        "input_ids": draw.integers(vocabulary, size.tokens),
        "is_special": torch.arange(vocabulary, device=draw.device) < 5,
        "choices": draw.integers(vocabulary, entries, 2),
        "cutoffs": draw.integers(2**32 + 1, entries),
        "mask_token_id": vocabulary // 2,
        "probability": draw.choice(0.15, 0.01, 0.5, 0.99),
        "seed": draw.integers(2**60, 1),
    }


declare_case(mlm_corruption, _case_inputs, None, result=torch.stack)
