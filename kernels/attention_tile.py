"""One tile of scores, queries by keys or keys by queries: what the attention kernels share.

Probabilities are exp2(score * unit - x), one multiply-add before the exponential: unit is the softmax scale * log2(e),
or 1 where a bias has been added to scores in units of log2. Arguments travel in tuples:

    keys:     (k_base, v_base, stride_k_token, stride_v_token, length), from the sequence's first key
    biases:   (alibi_ptr, relative_ptr, key_bias_ptr, span, left, right, head, first key in the batch); a bias that is
              not there is None
    dropout:  (keys of the queries or None, threshold, drop_scale); keys are those of dropout.row_keys
"""

import triton
import triton.language as tl
from fastenc.kernels.dropout import is_kept, row_keys, spread

LOG2_E = tl.constexpr(1.4426950408889634)


def shape_constants(key: dict) -> dict:
    """Constants that a tuned entry gives every attention kernel: shapes, precision, and whether there is dropout."""
    constants = {
        "H": 12,
        "D": key["head_dim"],
        "BLOCK_D": triton.next_power_of_2(key["head_dim"]),
        "PRECISION": key["precision"] if key["dtype"] == "float32" else "ieee",
    }
    return constants if key["dropout"] else {**constants, "rng_ptr": None, "keys_ptr": None}


@triton.jit
def load_rows(base, rows, stride, valid, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(len(rows), BLOCK_D), zero where not valid or past head_dim."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (offs_d < D)[None, :]
    pointers = base + rows.to(tl.int64)[:, None] * stride + offs_d[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_rows(base, rows, stride, valid, values, D: tl.constexpr, BLOCK_D: tl.constexpr):
    offs_d = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (offs_d < D)[None, :]
    pointers = base + rows.to(tl.int64)[:, None] * stride + offs_d[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def store_sums(base, sums, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A row of head_dim sums."""
    offs_d = tl.arange(0, BLOCK_D)
    tl.store(base + offs_d, sums, mask=offs_d < D)


@triton.jit
def sequence_bounds(cu_seqlens_ptr, sequence):
    """(first token, length)."""
    first = tl.load(cu_seqlens_ptr + sequence)
    return first, tl.load(cu_seqlens_ptr + sequence + 1) - first


@triton.jit
def head_rows(pointer, first, stride_token, head, stride_head):
    """Where a head's rows begin, from token `first` on; as far as 64 bits reach."""
    return pointer + first.to(tl.int64) * stride_token + head.to(tl.int64) * stride_head


@triton.jit
def sequence_keys(
    k_ptr, v_ptr, stride_k_token, stride_k_head, stride_v_token, stride_v_head, first, length, head
):
    """The tuple of keys for one head of a sequence."""
    k_base = head_rows(k_ptr, first, stride_k_token, head, stride_k_head)
    v_base = head_rows(v_ptr, first, stride_v_token, head, stride_v_head)
    return k_base, v_base, stride_k_token, stride_v_token, length


@triton.jit
def load_keys(keys, columns, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    k_base, v_base, stride_k_token, stride_v_token, length = keys
    valid = columns < length if MASKED else columns >= 0
    k = load_rows(k_base, columns, stride_k_token, valid, D, BLOCK_D)
    return k, load_rows(v_base, columns, stride_v_token, valid, D, BLOCK_D)


@triton.jit
def score_unit(qk_scale, biases, WINDOW: tl.constexpr):
    """What tile_scores' results are multiplied by; not negative. qk_scale: softmax scale * log2(e)."""
    alibi_ptr, relative_ptr, key_bias_ptr, _, _, _, _, _ = biases
    unbiased: tl.constexpr = alibi_ptr is None and relative_ptr is None and key_bias_ptr is None
    unit = qk_scale
    if not unbiased or WINDOW:
        unit = 1.0
    return unit


@triton.jit
def tile_scores(
    s,  # products of queries and keys
    rows,  # of the queries, in the count of the sequence's keys; broadcasts with
    columns,  # of the keys
    length_k,
    qk_scale,
    biases,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,  # whether columns may lie past the end
):
    """Scores / score_unit; -inf where a query does not see a key."""
    alibi_ptr, relative_ptr, key_bias_ptr, span, left, right, head, first_key = biases
    unbiased: tl.constexpr = alibi_ptr is None and relative_ptr is None and key_bias_ptr is None
    if not unbiased or WINDOW:
        s = s * qk_scale
    distance = columns - rows
    if alibi_ptr is not None:
        s -= tl.load(alibi_ptr + head).to(tl.float32) * LOG2_E * tl.abs(distance).to(tl.float32)
    if relative_ptr is not None:
        index = tl.minimum(tl.maximum(distance, -span), span) + span
        s += tl.load(relative_ptr + head * (2 * span + 1) + index).to(tl.float32) * LOG2_E
    if key_bias_ptr is not None:
        bias = tl.load(
            key_bias_ptr + first_key + columns, mask=columns < length_k, other=float("-inf")
        )
        s += bias.to(tl.float32) * LOG2_E
    elif MASKED:
        s = tl.where(columns < length_k, s, float("-inf"))
    if WINDOW:
        s = tl.where((distance >= -left) & (distance <= right), s, float("-inf"))
    return s


@triton.jit
def load_statistics(lse_ptr, delta_ptr, rows, valid):
    """(lse in units of log2, delta); without a row, or a key for it, lse is inf and probabilities will be 0."""
    lse = tl.load(lse_ptr + rows, mask=valid, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E
    return lse, tl.load(delta_ptr + rows, mask=valid, other=0.0)


@triton.jit
def store_row_keys(keys_ptr, rng, head, rows, indices, valid):
    """Each query's key of dropout, two words in one, for the kernels that would form it again for each block."""
    first, second = row_keys(rng, head, rows)
    words = (second.to(tl.int64) << 32) | first.to(tl.int64)
    tl.store(keys_ptr + indices, words, mask=valid)


@triton.jit
def load_row_keys(keys_ptr, indices, valid):
    words = tl.load(keys_ptr + indices, mask=valid, other=0)
    return words.to(tl.uint32), (words >> 32).to(tl.uint32)


@triton.jit
def score_gradients(p, dp, delta, columns, dropout):
    """(probabilities after dropout / drop_scale, gradient of the scores) of a tile.

    p: probabilities; dp: products of output gradients and values; delta: sum_j p_ij dp_ij - dlse_i of the queries. All
    broadcast against each other, and dropout's keys with the columns.
    """
    query_keys, threshold, drop_scale = dropout
    kept = p
    if query_keys is not None:
        keep = is_kept(query_keys, spread(columns), threshold)
        kept = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp, 0.0) * drop_scale
    return kept, p * (dp - delta)
