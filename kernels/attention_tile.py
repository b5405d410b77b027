"""One tile of scores, queries by keys: what the attention kernels share.

Scores are in units of log2 inside the kernels, for exp2. Arguments travel in tuples:

    keys:     (k_base, v_base, stride_k_token, stride_v_token, length), from the sequence's first key
    biases:   (alibi_ptr, relative_ptr, key_bias_ptr, span, left, right, head, first key in the batch); a bias that is
              not there is None
    dropout:  (rng_ptr or None, stream, threshold, drop_scale)
"""

import triton
import triton.language as tl
from fastenc.kernels.dropout import dropout_scale, load_rng

LOG2_E = tl.constexpr(1.4426950408889634)


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
def tile_scores(
    q,
    k,
    rows,  # of the queries, in the count of the sequence's keys
    columns,  # of the keys
    length_k,
    qk_scale,
    biases,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,  # whether columns may lie past the end
    PRECISION: tl.constexpr,
):
    """Scores in units of log2; -inf where a query does not see a key. qk_scale: softmax scale * log2(e)."""
    alibi_ptr, relative_ptr, key_bias_ptr, span, left, right, head, first_key = biases
    s = tl.dot(q, k.T, input_precision=PRECISION) * qk_scale
    distance = columns[None, :] - rows[:, None]
    if alibi_ptr is not None:
        s -= tl.load(alibi_ptr + head).to(tl.float32) * LOG2_E * tl.abs(distance).to(tl.float32)
    if relative_ptr is not None:
        place = tl.minimum(tl.maximum(distance, -span), span) + span
        s += tl.load(relative_ptr + head * (2 * span + 1) + place).to(tl.float32) * LOG2_E
    if key_bias_ptr is not None:
        bias = tl.load(
            key_bias_ptr + first_key + columns, mask=columns < length_k, other=float("-inf")
        )
        s += (bias.to(tl.float32) * LOG2_E)[None, :]
    elif MASKED:
        s = tl.where((columns < length_k)[None, :], s, float("-inf"))
    if WINDOW:
        s = tl.where((distance >= -left) & (distance <= right), s, float("-inf"))
    return s


@triton.jit
def drop_keep(tokens, columns, dropout):
    """Factors of dropout, 0 or drop_scale; tokens: the queries in the batch; columns: the keys in their sequence."""
    rng_ptr, stream, threshold, drop_scale = dropout
    return dropout_scale(load_rng(rng_ptr), stream, tokens, columns, threshold, drop_scale)


@triton.jit
def load_statistics(lse_ptr, delta_ptr, rows, valid):
    """(lse in units of log2, delta); without a row, or a key for it, lse is inf and probabilities will be 0."""
    lse = tl.load(lse_ptr + rows, mask=valid, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E
    return lse, tl.load(delta_ptr + rows, mask=valid, other=0.0)


@triton.jit
def score_gradients(s, v, dout, lse, delta, tokens, columns, dropout, PRECISION: tl.constexpr):
    """(probabilities after dropout, gradient of the scores) of a tile. delta: sum_j p_ij dp_ij - dlse_i of the rows."""
    p = tl.math.exp2(s - lse[:, None])
    dp = tl.dot(dout, v.T, input_precision=PRECISION)
    kept = p
    if dropout[0] is not None:
        keep = drop_keep(tokens[:, None], columns[None, :], dropout)
        kept = p * keep
        dp *= keep
    return kept, p * (dp - delta[:, None])
