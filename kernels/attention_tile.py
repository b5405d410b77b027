"""One tile of scores, queries by keys or keys by queries: what the attention kernels share.

A probability comes from a product of a query and a key; or from a score, where there is a bias or a window:

    forward, product:   exp2(product * scale * log2(e) - x)         one multiply-add before the exponential
    forward, score:     exp2((score - x) * log2(e))                 nothing is rounded before the subtraction
    backward, product:  exp2((product - x) * scale * log2(e) - y)
    backward, score:    exp2((score - x) * log2(e) - y)

In the forward x is the row's maximum. In the backward x and y come from the query's record. For products they are 0 and
the log-sum-exp, in units of log2; for scores the log-sum-exp and 0. Where rounding the log-sum-exp would show, they are
the row's maximum and log2 of its sum.

Arguments travel in tuples:

    keys:     (k_base, v_base, stride_k_token, stride_v_token, length), from the sequence's first key
    biases:   (alibi_ptr, relative_ptr, key_bias_ptr, span, left, right, head, first key in the batch); a bias that is
              not there is None
    dropout:  (keys of the queries or None, threshold); keys are those of dropout.row_keys
"""

import torch
import triton
import triton.language as tl
from fastenc.kernels.dropout import is_kept, row_keys, spread
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
HUGE = tl.constexpr(2.0**28)  # see scaled()
# From here on, rounding a log-sum-exp changes a probability by more than 3e-5.
LARGE = tl.constexpr(1024.0)
# Words of a query's record: log_sum, second, base, -, key of dropout (two), -, -.
RECORD = tl.constexpr(8)


def new_record(lse: Tensor) -> Tensor:
    """(H, total_q, RECORD), int32: room for a record of each query."""
    return lse.new_empty((*lse.shape, RECORD.value), dtype=torch.int32)


def shape_constants(key: dict) -> dict:
    """Constants that a tuned entry gives every attention kernel: shapes, precision, and whether there is dropout."""
    constants = {
        "H": 12,
        "GROUP": 1,
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
def score_unit(scale, biases, WINDOW: tl.constexpr):
    """The factor from tile_scores' results to units of log2."""
    alibi_ptr, relative_ptr, key_bias_ptr, _, _, _, _, _ = biases
    unbiased: tl.constexpr = alibi_ptr is None and relative_ptr is None and key_bias_ptr is None
    if unbiased and not WINDOW:
        return scale * LOG2_E
    else:
        return LOG2_E


@triton.jit
def probabilities(s, base, log_sum, unit):
    """Probabilities from tile_scores' results or products s, and the base and log_sum of each query's record."""
    return tl.math.exp2((s - base) * unit - log_sum)


@triton.jit
def with_keys(maxima, sums, s, unit):
    """The maxima and sums of exponentials of queries, updated by a tile of keys by queries."""
    higher = tl.maximum(maxima, tl.max(s, 0))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # of a query that saw no key yet
    sums *= tl.math.exp2((maxima - base) * unit)
    return higher, sums + tl.sum(tl.math.exp2((s - base[None, :]) * unit), 0)


@triton.jit
def with_columns(maxima, sums, s, unit):
    """As with_keys, for a tile of queries by keys. Each query must see a key of the first tile."""
    higher = tl.maximum(maxima, tl.max(s, 1))
    sums *= tl.math.exp2((maxima - higher) * unit)
    return higher, sums + tl.sum(tl.math.exp2((s - higher[:, None]) * unit), 1)


@triton.jit
def is_large(lse):
    """Whether rounding a query's log-sum-exp would show in its probabilities: they need its maximum and sum apart."""
    return (tl.abs(lse) > LARGE) & (tl.abs(lse) < float("inf"))


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
def store_record(record_ptr, log_sum, base, second, rng, head, rows, indices, valid):
    """Each query's record, RECORD words for the backward: log_sum and base for probabilities(), ``second``, and the two
    words of its key of dropout. Separate loads of them would be repeated in each column that a thread has.

    log_sum: -inf if the query saw no key, stored as inf; second: int32; rng: by load_rng, or None.
    """
    log_sum = tl.where(log_sum == float("-inf"), float("inf"), log_sum).to(tl.int32, bitcast=True)
    base = base.to(tl.int32, bitcast=True)
    zero = second * 0
    one, two = zero, zero
    if rng is not None:
        mask_key = row_keys(rng, head, rows)
        one, two = mask_key[0].to(tl.int32, bitcast=True), mask_key[1].to(tl.int32, bitcast=True)
    even = tl.join(tl.join(log_sum, one), tl.join(base, zero))
    odd = tl.join(tl.join(second, two), tl.join(zero, zero))
    words = tl.reshape(tl.join(even, odd), [valid.shape[0], RECORD])
    pointers = record_ptr + indices.to(tl.int64)[:, None] * RECORD + tl.arange(0, RECORD)[None, :]
    tl.store(pointers, words, mask=valid[:, None])


@triton.jit
def load_record(record_ptr, indices, valid):
    """(log_sum, base, int32 second word, the two words of the key of dropout); all 0 without a record."""
    pointers = record_ptr + indices.to(tl.int64)[:, None] * RECORD + tl.arange(0, RECORD)[None, :]
    words = tl.load(pointers, mask=valid[:, None], other=0)
    even, odd = tl.split(tl.reshape(words, [valid.shape[0], 4, 2]))
    sums_and_one, bases = tl.split(tl.reshape(even, [valid.shape[0], 2, 2]))
    seconds_and_two, _ = tl.split(tl.reshape(odd, [valid.shape[0], 2, 2]))
    log_sum, one = tl.split(sums_and_one)
    base, _ = tl.split(bases)
    second, two = tl.split(seconds_and_two)
    log_sum, base = log_sum.to(tl.float32, bitcast=True), base.to(tl.float32, bitcast=True)
    return log_sum, base, second, one.to(tl.uint32, bitcast=True), two.to(tl.uint32, bitcast=True)


@triton.jit
def load_record_once(record_ptr, indices, valid):
    """As load_record, by a load for each word: for records that are read before a loop, or for queries by keys.

    What load_record splits would be moved into another layout again in each turn of the loop. Queries by keys, a thread
    has few queries; without matrix instructions load_record takes so many registers that it spills.
    """
    words = record_ptr + indices.to(tl.int64) * RECORD
    log_sum = tl.load(words, mask=valid, other=0).to(tl.float32, bitcast=True)
    second = tl.load(words + 1, mask=valid, other=0)
    base = tl.load(words + 2, mask=valid, other=0).to(tl.float32, bitcast=True)
    one = tl.load(words + 4, mask=valid, other=0).to(tl.uint32, bitcast=True)
    two = tl.load(words + 5, mask=valid, other=0).to(tl.uint32, bitcast=True)
    return log_sum, base, second, one, two


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
