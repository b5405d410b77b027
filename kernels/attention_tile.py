"""One tile of scores, queries by keys or keys by queries: what the attention kernels share.

Probabilities are exp2(product * scale * log2(e) - x), one multiply-add before the exponential. With a bias or a window
they are exp2((score - x) * log2(e) - y), where nothing is rounded before the subtraction. The forward has the row's
maximum as x. The backward has lse, or where rounding it would show, the maximum again and log2 of the row's sum as y.
Arguments travel in tuples:

    keys:     (k_base, v_base, stride_k_token, stride_v_token, length), from the sequence's first key
    biases:   (alibi_ptr, relative_ptr, key_bias_ptr, span, left, right, head, first key in the batch); a bias that is
              not there is None
    dropout:  (keys of the queries or None, threshold); keys are those of dropout.row_keys
"""

import triton
import triton.language as tl
from fastenc.kernels.dropout import is_kept, row_keys, spread

LOG2_E = tl.constexpr(1.4426950408889634)
HUGE = tl.constexpr(2.0**28)


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
def scaled(products, unit):
    """A row's largest product in units of log2; unit: softmax scale * log2(e), above 0.

    A multiply-add subtracts its rounding error from all exponents of the row, which cancels out of the softmax while
    the error is small. From HUGE on the unit is a power of two, by which the product is exact. Neighbouring numbers
    then differ by more than 16 in the exponent, so that keys below the maximum get no weight by either unit.
    """
    exact = products * unit
    return tl.where(tl.abs(exact) < HUGE, exact, products * _power_above(unit))


@triton.jit
def unit_of(row_max, unit):
    """What ``scaled`` multiplied a row's largest product by; row_max: its result."""
    return tl.where(tl.abs(row_max) < HUGE, unit, _power_above(unit))


@triton.jit
def _power_above(unit):
    """The least power of two above a positive number."""
    exponent = tl.cast(unit, tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
    return (exponent + 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def natural_lse(row_max, row_sum, scale):
    """The log-sum-exp of scores; row_max: by ``scaled``; row_sum: of exponentials above it."""
    unit = scale * LOG2_E
    log_sum = tl.math.log2(row_sum)
    small = (row_max + log_sum) / LOG2_E
    return tl.where(tl.abs(row_max) < HUGE, small, row_max * (scale / _power_above(unit)))


@triton.jit
def probabilities(s, lse, log_sum, scale):
    """Of tile_scores' results and the queries' lse as in their records, which broadcasts.

    log_sum: by _attention_delta_kernel, in lse's shape; None where the results are products, not scores.
    """
    if log_sum is None:
        return tl.math.exp2(s * (scale * LOG2_E) - lse)
    else:
        return tl.math.exp2((s - lse) * LOG2_E - log_sum)


@triton.jit
def tile_scores(
    s,  # products of queries and keys
    rows,  # of the queries, in the count of the sequence's keys; broadcasts with
    columns,  # of the keys
    length_k,
    scale,
    biases,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,  # whether columns may lie past the end
):
    """Products, or scores where there is a bias or a window; -inf where a query does not see a key."""
    alibi_ptr, relative_ptr, key_bias_ptr, span, left, right, head, first_key = biases
    unbiased: tl.constexpr = alibi_ptr is None and relative_ptr is None and key_bias_ptr is None
    if not unbiased or WINDOW:
        s = s * scale
    distance = columns - rows
    if alibi_ptr is not None:
        s -= tl.load(alibi_ptr + head).to(tl.float32) * tl.abs(distance).to(tl.float32)
    if relative_ptr is not None:
        index = tl.minimum(tl.maximum(distance, -span), span) + span
        s += tl.load(relative_ptr + head * (2 * span + 1) + index).to(tl.float32)
    if key_bias_ptr is not None:
        bias = tl.load(
            key_bias_ptr + first_key + columns, mask=columns < length_k, other=float("-inf")
        )
        s += bias.to(tl.float32)
    elif MASKED:
        s = tl.where(columns < length_k, s, float("-inf"))
    if WINDOW:
        s = tl.where((distance >= -left) & (distance <= right), s, float("-inf"))
    return s


@triton.jit
def store_record(record_ptr, lse, second, rng, head, rows, indices, valid, NATURAL: tl.constexpr):
    """Each query's record, 16 bytes for the backward: lse (inf if the query saw no key), ``second``, and the two words
    of its key of dropout. Separate loads of them would be repeated in each column that a thread has.

    lse: natural logarithm, stored in units of log2 unless NATURAL; second: int32; rng: by load_rng, or None.
    """
    if not NATURAL:
        lse *= LOG2_E
    word = tl.where(lse == float("-inf"), float("inf"), lse).to(tl.int32, bitcast=True)
    one, two = second * 0, second * 0
    if rng is not None:
        found = row_keys(rng, head, rows)
        one, two = found[0].to(tl.int32, bitcast=True), found[1].to(tl.int32, bitcast=True)
    words = tl.reshape(tl.join(tl.join(word, one), tl.join(second, two)), [valid.shape[0], 4])
    pointers = record_ptr + indices.to(tl.int64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(pointers, words, mask=valid[:, None])


@triton.jit
def load_record(record_ptr, indices, valid):
    """(lse, int32 second word, the two words of the key of dropout); without a record, lse is inf."""
    pointers = record_ptr + indices.to(tl.int64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = tl.load(pointers, mask=valid[:, None], other=0)
    even, odd = tl.split(tl.reshape(words, [valid.shape[0], 2, 2]))
    lse, one = tl.split(even)
    second, two = tl.split(odd)
    lse = tl.where(valid, lse.to(tl.float32, bitcast=True), float("inf"))
    return lse, second, one.to(tl.uint32, bitcast=True), two.to(tl.uint32, bitcast=True)


@triton.jit
def load_record_once(record_ptr, indices, valid):
    """As load_record, by a load for each word, for programs that read their records before their loop.

    What load_record splits would be moved into another layout again in each turn of the loop.
    """
    words = record_ptr + indices.to(tl.int64) * 4
    lse = tl.load(words, mask=valid, other=0).to(tl.float32, bitcast=True)
    second = tl.load(words + 1, mask=valid, other=0)
    one = tl.load(words + 2, mask=valid, other=0).to(tl.uint32, bitcast=True)
    two = tl.load(words + 3, mask=valid, other=0).to(tl.uint32, bitcast=True)
    return tl.where(valid, lse, float("inf")), second, one, two


@triton.jit
def score_gradients(p, dp, delta, columns, dropout):
    """(probabilities after dropout, gradient of the scores) of a tile, both divided by drop_scale.

    p: probabilities; dp: products of output gradients and values; delta: (sum_j p_ij dp_ij - dlse_i) / drop_scale of
    the queries. All broadcast against each other, and dropout's keys with the columns.
    """
    query_keys, threshold = dropout
    if query_keys is None:
        return p, p * (dp - delta)
    else:
        # One selection, because a mask that is used twice stays in registers.
        kept = tl.where(is_kept(query_keys, spread(columns), threshold), p, 0.0)
        return kept, kept * dp - p * delta
