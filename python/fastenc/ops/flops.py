"""FLOPs of our ops for ``torch.utils.flop_counter``: those of their matrix products.

Imported only where FLOPs may be counted, because torch's module imports triton, which is slow to import.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import fastenc.ops  # noqa: F401  (defines the ops)
from fastenc.ops import encoder_layer, gemm, int8_products  # noqa: F401
from fastenc.ops.block_sparse_attention import BlockPlan
from fastenc.ops.block_sparse_attention import visible_pairs as planned_pairs

# {argument's name: value} of a call → FLOPs.
Formula = Callable[[dict[str, Any]], float]


def visible_pairs(length: int, window: tuple[int, int]) -> int:
    """The number of pairs of a query and a key that it sees, in one head of a sequence's self-attention.

    Args: window: number of tokens that a token sees on the left and on the right, -1 without a limit.
    """
    pairs = length
    for side in window:
        reach = length - 1 if side < 0 else min(side, length - 1)
        # Tokens near the sequence's end see fewer.
        pairs += reach * length - reach * (reach + 1) // 2
    return pairs


def _pairs(
    queries: Tensor, keys: Tensor | None, longest: tuple[int, int], window: tuple[int, int]
) -> float:
    """The same for all sequences of a call.

    Args:
        queries, keys: offsets of the sequences; keys None: the same as queries. With keys of their own, every query
            counts as one whose window is inside of the keys.
        longest: max_seqlen of the queries and of the keys. Offsets of fake tensors have no values; then every sequence
            counts as the longest.
    """
    if queries.is_meta or type(queries) is not Tensor:
        count = queries.shape[0] - 1
        lengths, key_lengths = [longest[0]] * count, [longest[1]] * count
    else:
        lengths = queries.diff().tolist()
        key_lengths = lengths if keys is None else keys.diff().tolist()
    if keys is None:
        return float(sum(visible_pairs(n, window) for n in lengths))
    seen = [n if min(window) < 0 else min(n, sum(window) + 1) for n in key_lengths]
    return float(sum(n * m for n, m in zip(lengths, seen, strict=True)))


def _window(a: dict[str, Any]) -> tuple[int, int]:
    return a["window_left"], a["window_right"]


def _attention(products: int) -> Formula:
    def flops(a: dict[str, Any]) -> float:
        longest = a["max_seqlen_q"], a["max_seqlen_k"]
        pairs = _pairs(a["cu_seqlens_q"], a["cu_seqlens_k"], longest, _window(a))
        return 2 * products * a["q"].shape[1] * a["q"].shape[2] * pairs

    return flops


def _disentangled_attention(products: int, of_term: int) -> Formula:
    """of_term: products more for each term of relative positions."""

    def flops(a: dict[str, Any]) -> float:
        terms = sum(a[name] is not None for name in ("position_keys", "position_queries"))
        pairs = _pairs(a["cu_seqlens"], None, (a["max_seqlen"],) * 2, (-1, -1))
        return 2 * (products + terms * of_term) * a["q"].shape[1] * a["q"].shape[2] * pairs

    return flops


def _block_sparse_attention(products: int) -> Formula:
    """Plans of fake tensors have no values; then every entry counts as two whole blocks."""

    def flops(a: dict[str, Any]) -> float:
        plan, size = BlockPlan(a["starts"], a["columns"], a["counts"]), a["block_size"]
        if plan.starts.is_meta or type(plan.starts) is not Tensor:
            pairs = float(plan.columns.shape[0] * size * size)
        else:
            pairs = planned_pairs(plan, a["cu_seqlens"], size)
        return 2 * products * a["q"].shape[1] * a["q"].shape[2] * pairs

    return flops


def _global_window_attention(products: int) -> Formula:
    """FLOPs of the local queries. A global key counts once more for each query, also if it is in the query's window."""

    def flops(a: dict[str, Any]) -> float:
        longest = a["max_seqlen"], min(a["max_seqlen"], a["global_tokens"].shape[0])
        pairs = _pairs(a["cu_seqlens"], None, longest, _window(a))
        pairs += _pairs(a["cu_seqlens"], a["cu_globals"], longest, (-1, -1))
        return 2 * products * a["q"].shape[1] * a["q"].shape[2] * pairs

    return flops


def _layer_attention(a: dict[str, Any]) -> float:
    width = a["num_heads"] * a["head_dim"]
    columns = width + 2 * a["num_key_heads"] * a["head_dim"]
    pairs = _pairs(a["cu_seqlens"], None, (a["max_seqlen"],) * 2, _window(a))
    return 2 * a["x"].numel() * columns + 4 * width * pairs


def _layer_after_attention(a: dict[str, Any]) -> float:
    gated = a["gated"] if "gated" in a else a["gate"] is not None
    hidden, ups = a["residual"].shape[1], 2 if gated else 1
    return 2 * hidden * (a["attended"].numel() + (ups + 1) * a["inner"] * len(a["residual"]))


FORMULAS: dict[str, Formula] = {
    "attention_fwd": _attention(2),
    # The backward computes the scores again.
    "attention_bwd": _attention(5),
    "block_sparse_attention_fwd": _block_sparse_attention(2),
    "block_sparse_attention_bwd": _block_sparse_attention(5),
    "disentangled_attention_fwd": _disentangled_attention(2, 1),
    "disentangled_attention_bwd": _disentangled_attention(5, 3),
    "global_window_attention_fwd": _global_window_attention(2),
    "global_window_attention_bwd": _global_window_attention(5),
    "linear_gelu_fwd": lambda a: 2 * a["x"].numel() * a["weight"].shape[0],
    "linear_gelu_bwd": lambda a: 2 * a["dy"].numel() * a["weight"].shape[1],
    "batch_invariant_linear": lambda a: 2 * a["x"].numel() * a["weight"].shape[0],
    "gemm": lambda a: 2 * a["a"].numel() * a["b"].shape[1],
    "gemm_add_": lambda a: 2 * a["a"].numel() * a["b"].shape[1],
    "gemm_packed": lambda a: 2 * a["a"].numel() * a["columns"],
    "encoder_layer_attention": _layer_attention,
    "encoder_layer_after_attention": _layer_after_attention,
    "linear_segment_log_sum_fwd": lambda a: 2 * a["hidden"].numel() * a["weight"].shape[0],
    "linear_segment_max_fwd": lambda a: 2 * a["hidden"].numel() * a["weight"].shape[0],
    "int8_linear": lambda a: 2 * a["x"].numel() * a["columns"],
    "int8_layer_attention": _layer_attention,
    "int8_layer_after_attention": _layer_after_attention,
}


def _register(name: str, formula: Formula) -> None:
    op = getattr(torch.ops.fastenc, name)
    names = [argument.name for argument in op.default._schema.arguments]

    @register_flop_formula(op, get_raw=True)
    def flops(*arguments: Any, out_val: Any = None, **options: Any) -> int:
        return int(formula(dict(zip(names, arguments, strict=False)) | options))


for _name, _formula in FORMULAS.items():
    _register(_name, _formula)
