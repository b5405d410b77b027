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
    return constants if key["dropout"] else {**constants, "rng_ptr": None}


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
def store_record(record_ptr, lse, second, rng, head, rows, indices, valid):
    """Each query's record, 16 bytes for the backward: lse in units of log2 (inf if the query saw no key), ``second``,
    and the two words of its key of dropout. Separate loads of them would be repeated in each column that a thread has.

    lse: natural logarithm; second: int32; rng: by load_rng, or None without dropout.
    """
    log2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E).to(tl.int32, bitcast=True)
    one, two = second * 0, second * 0
    if rng is not None:
        found = row_keys(rng, head, rows)
        one, two = found[0].to(tl.int32, bitcast=True), found[1].to(tl.int32, bitcast=True)
    words = tl.reshape(tl.join(tl.join(log2, one), tl.join(second, two)), [valid.shape[0], 4])
    pointers = record_ptr + indices.to(tl.int64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(pointers, words, mask=valid[:, None])


@triton.jit
def load_record(record_ptr, indices, valid):
    """(lse in units of log2, int32 second word, the two words of the key of dropout); without a record, lse is inf."""
    pointers = record_ptr + indices.to(tl.int64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = tl.load(pointers, mask=valid[:, None], other=0)
    even, odd = tl.split(tl.reshape(words, [valid.shape[0], 2, 2]))
    lse, one = tl.split(even)
    second, two = tl.split(odd)
    lse = tl.where(valid, lse.to(tl.float32, bitcast=True), float("inf"))
    return lse, second, one.to(tl.uint32, bitcast=True), two.to(tl.uint32, bitcast=True)


@triton.jit
def score_gradients(p, dp, delta, columns, dropout):
    """(probabilities after dropout / drop_scale, gradient of the scores) of a tile.

    p: probabilities; dp: products of output gradients and values; delta: sum_j p_ij dp_ij - dlse_i of the queries. All
    broadcast against each other, and dropout's keys with the columns.
    """
    query_keys, threshold, drop_scale = dropout
    if query_keys is None:
        return p, p * (dp - delta)
    else:
        # One selection, because a mask that is used twice stays in registers.
        kept = tl.where(is_kept(query_keys, spread(columns), threshold), p, 0.0)
        return kept, kept * (dp * drop_scale) - p * delta
