// One (sequence, head) at a time. Operands are widened to float once, keys (and in the backward values)
// transposed, so that every product is C (+)= A B with B's columns contiguous: one family of register tiles
// serves all of them. Scores exist for a block of query rows only; the backward forms them again instead of
// reading them back, so nothing of size length x length is ever stored.

static_assert(kAttentionRows % kLanes == 0);

// C (rows x columns) = A B, where B (depth x columns) is stored in panels of kPanel columns.
static void multiply_panels(
    const float* a, int64_t lda, const float* panels, float* c, int64_t ldc, int64_t rows, int64_t columns,
    int64_t depth) {
  for (int64_t j = 0; j < columns; j += kPanel)
    multiply_panel(a, lda, panels + j * depth, kPanel, c + j, ldc, rows, panel_width(columns - j), depth, false);
}

// C (rows x columns) = or += A B, all of them row by row (A transposed: column by column).
template <bool kTransposed = false>
static void multiply(
    const float* a, int64_t lda, const float* b, float* c, int64_t rows, int64_t columns, int64_t depth, bool add) {
  for (int64_t k = 0; k < depth; k += kDepth)
    for (int64_t j = 0; j < columns; j += kPanel)
      multiply_panel<kTransposed>(
          a + k * (kTransposed ? lda : 1), lda, b + k * columns + j, columns, c + j, columns, rows,
          panel_width(columns - j), depth - k < kDepth ? depth - k : kDepth, add || k);
}

// Widens `rows` rows to float, times `factor`.
template <class T>
static void widen(const T* source, int64_t stride, int64_t rows, int64_t head_dim, float factor, float* target) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < head_dim; d += kLanes)
      store(target + i * head_dim + d, load(source + i * stride + d) * factor);
}

template <class T>
static void narrow(const float* source, int64_t rows, int64_t head_dim, float factor, T* target, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < head_dim; d += kLanes)
      store(target + i * stride + d, load(source + i * head_dim + d) * factor);
}

// Widens and transposes `rows` rows into panels of kPanel columns; the columns up to the next multiple of kLanes are 0.
template <class T>
static void widen_transposed(const T* source, int64_t stride, int64_t rows, int64_t head_dim, float* panels) {
  for (int64_t j = 0; j < rows; j += kLanes) {
    float* target = panels + j / kPanel * kPanel * head_dim + j % kPanel;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = j + i < rows ? load(source + (j + i) * stride + d) : Vec{};
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(target + (d + i) * kPanel, block[i]);
    }
  }
}

constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x at most a little above 0, to about one unit in the last place: a minimax polynomial on [-1/2, 1/2] times
// a power of two. Below -126 the result is 0. NaN stays NaN.
FASTENC_INLINE Vec exp2_of_negative(Vec x) {
  const float round_to_int = 12582912.f + 127.f;  // 1.5 * 2^23 and the bias of the exponent
  const Vec shifted = x + round_to_int;
  const Vec f = x - (shifted - round_to_int);
  Vec p = splat(1.5353362e-4f);
  p = p * f + 1.3398875e-3f;
  p = p * f + 9.61843692e-3f;
  p = p * f + 5.55033237e-2f;
  p = p * f + 2.40226477e-1f;
  p = p * f + 6.93147182e-1f;
  p = p * f + 1.f;
  const Vec result = p * (Vec)((VecI)shifted << 23);
  return x < splat(-126.f) ? Vec{} : result;
}

// Lane-wise maxima of `length` scores; those beyond, up to a whole vector, become -inf.
FASTENC_INLINE Vec row_maxima(float* scores, int64_t length) {
  const int64_t whole = length / kLanes * kLanes;
  Vec highest = splat(-__builtin_inff());
  for (int64_t j = 0; j < whole; j += kLanes) highest = max(load(scores + j), highest);
  if (whole < length) {
    const VecI inside = kLaneIndex < (int32_t)(length - whole);
    const Vec last = inside ? load(scores + whole) : splat(-__builtin_inff());
    store(scores + whole, last);
    highest = max(last, highest);
  }
  return highest;
}

// out[r] combines all lanes of partial[r]; both have room for `rows` rounded up to kLanes.
template <Vec (*kCombine)(Vec, Vec)>
FASTENC_INLINE void fold_all(Vec* partial, int64_t rows, float* out) {
  for (int64_t r = rows; r % kLanes; ++r) partial[r] = Vec{};
  for (int64_t r = 0; r < rows; r += kLanes) store(out + r, fold_rows<kCombine>(partial + r));
}

FASTENC_INLINE void row_dropout(const Attention& a, int64_t token, int64_t head, int64_t length, float* keep) {
  dropout_scales(a.dropout, (uint32_t)head, (uint32_t)token, length, keep);
}

FASTENC_INLINE int64_t padded_length(int64_t length) { return (length + kLanes - 1) / kLanes * kLanes; }
FASTENC_INLINE int64_t panels_length(int64_t length) { return (length + kPanel - 1) / kPanel * kPanel; }
// Distance between rows of scores: never a multiple of the page size, where columns would share few cache sets.
FASTENC_INLINE int64_t scores_stride(int64_t length) { return padded_length(length) + 16; }

// The first row of a task's tokens.
template <class T>
FASTENC_INLINE const T* rows_of(const PackedHeads& x, int64_t first, int64_t head) {
  return (const T*)x.data + first * x.token_stride + head * x.head_stride;
}

template <class T>
static void clear_rows(T* target, int64_t stride, int64_t rows, int64_t head_dim) {
  for (int64_t i = 0; i < rows; ++i) __builtin_memset(target + i * stride, 0, head_dim * sizeof(T));
}

template <class T>
static void attention_forward_task(const Attention& a, const AttentionTask& task, float* scratch) {
  const int64_t dim = a.head_dim, length = task.length_k;
  const int64_t padded = padded_length(length), stride = scores_stride(length);
  const T* q = rows_of<T>(a.q, task.first_q, task.head);
  T* out = (T*)a.out + (task.first_q * a.num_heads + task.head) * dim;
  float* lse = a.lse + task.head * a.total_q + task.first_q;
  if (!length) {
    clear_rows(out, a.num_heads * dim, task.length_q, dim);
    for (int64_t i = 0; i < task.length_q; ++i) lse[i] = -__builtin_inff();
    return;
  }
  float* keys = scratch;  // transposed, in panels
  float* values = keys + panels_length(length) * dim;
  float* scores = values + length * dim;
  float* queries = scores + kAttentionRows * stride;
  float* result = queries + kAttentionRows * dim;
  float* keep = result + kAttentionRows * dim;
  widen_transposed(rows_of<T>(a.k, task.first_k, task.head), a.k.token_stride, length, dim, keys);
  widen(rows_of<T>(a.v, task.first_k, task.head), a.v.token_stride, length, dim, 1.f, values);
  for (int64_t row = 0; row < task.length_q; row += kAttentionRows) {
    const int64_t left = task.length_q - row, rows = left < kAttentionRows ? left : kAttentionRows;
    widen(q + row * a.q.token_stride, a.q.token_stride, rows, dim, a.scale, queries);
    multiply_panels(queries, dim, keys, scores, stride, rows, padded, dim);
    Vec partial[kAttentionRows];
    float tops[kAttentionRows], totals[kAttentionRows];
    for (int64_t r = 0; r < rows; ++r) partial[r] = row_maxima(scores + r * stride, length);
    fold_all<max>(partial, rows, tops);
    for (int64_t r = 0; r < rows; ++r) {
      float* p = scores + r * stride;
      const Vec top = splat(tops[r] * kLog2E);
      Vec total{};
      for (int64_t j = 0; j < padded; j += kLanes) {
        const Vec e = exp2_of_negative(load(p + j) * kLog2E - top);
        total += e;
        store(p + j, e);
      }
      partial[r] = total;
      if (a.dropout.threshold) {
        row_dropout(a, task.first_q + row + r, task.head, length, keep);
        for (int64_t j = 0; j < padded; j += kLanes) store(p + j, load(p + j) * load(keep + j));
      }
    }
    fold_all<add>(partial, rows, totals);
    multiply(scores, stride, values, result, rows, dim, length, false);
    for (int64_t r = 0; r < rows; ++r) {
      narrow(result + r * dim, 1, dim, 1.f / totals[r], out + (row + r) * a.num_heads * dim, dim);
      lse[row + r] = tops[r] + __builtin_logf(totals[r]);
    }
  }
}

// dv = p_kept^T dout;  dp = dout v^T, kept;  ds = p (dp - sum_j p dp + dlse);  dq = scale ds k;  dk = scale ds^T q.
template <class T>
static void attention_backward_task(const Attention& a, const AttentionTask& task, float* scratch) {
  const int64_t dim = a.head_dim, length = task.length_k;
  const int64_t padded = padded_length(length), stride = scores_stride(length);
  const int64_t keep_stride = dropout_room(length);
  const int64_t size = length * dim, panels_size = panels_length(length) * dim;
  const int64_t out_stride = a.num_heads * dim;
  const T* q = rows_of<T>(a.q, task.first_q, task.head);
  const T* k = rows_of<T>(a.k, task.first_k, task.head);
  const T* v = rows_of<T>(a.v, task.first_k, task.head);
  const T* dout = (const T*)a.dout + task.first_q * out_stride + task.head * dim;
  const float* dlse = a.dlse ? a.dlse + task.head * a.total_q + task.first_q : nullptr;
  T* dq = (T*)a.dq + task.first_q * a.grad_stride + task.head * dim;
  T* dk = (T*)a.dk + task.first_k * a.grad_stride + task.head * dim;
  T* dv = (T*)a.dv + task.first_k * a.grad_stride + task.head * dim;
  if (!length || !task.length_q) {
    clear_rows(dq, a.grad_stride, task.length_q, dim);
    clear_rows(dk, a.grad_stride, length, dim);
    clear_rows(dv, a.grad_stride, length, dim);
    return;
  }
  float* keys_t = scratch;
  float* values_t = keys_t + panels_size;
  float* keys = values_t + panels_size;
  float* dkeys = keys + size;
  float* dvalues = dkeys + size;
  float* queries = dvalues + size;
  float* douts = queries + kAttentionRows * dim;
  float* dqueries = douts + kAttentionRows * dim;
  float* p = dqueries + kAttentionRows * dim;
  float* ds = p + kAttentionRows * stride;
  float* keep = ds + kAttentionRows * stride;
  widen_transposed(k, a.k.token_stride, length, dim, keys_t);
  widen_transposed(v, a.v.token_stride, length, dim, values_t);
  widen(k, a.k.token_stride, length, dim, 1.f, keys);
  for (int64_t row = 0; row < task.length_q; row += kAttentionRows) {
    const int64_t left = task.length_q - row, rows = left < kAttentionRows ? left : kAttentionRows;
    widen(q + row * a.q.token_stride, a.q.token_stride, rows, dim, a.scale, queries);
    widen(dout + row * out_stride, out_stride, rows, dim, 1.f, douts);
    multiply_panels(queries, dim, keys_t, p, stride, rows, padded, dim);
    multiply_panels(douts, dim, values_t, ds, stride, rows, padded, dim);
    Vec partial[kAttentionRows], partial_deltas[kAttentionRows];
    float tops[kAttentionRows], totals[kAttentionRows], deltas[kAttentionRows];
    for (int64_t r = 0; r < rows; ++r) partial[r] = row_maxima(p + r * stride, length);
    fold_all<max>(partial, rows, tops);
    for (int64_t r = 0; r < rows; ++r) {
      float* p_row = p + r * stride;
      float* ds_row = ds + r * stride;
      if (a.dropout.threshold) {
        row_dropout(a, task.first_q + row + r, task.head, length, keep + r * keep_stride);
        for (int64_t j = 0; j < padded; j += kLanes)
          store(ds_row + j, load(ds_row + j) * load(keep + r * keep_stride + j));
      }
      const Vec top = splat(tops[r] * kLog2E);
      Vec total{}, row_deltas{};
      for (int64_t j = 0; j < padded; j += kLanes) {
        const Vec e = exp2_of_negative(load(p_row + j) * kLog2E - top);
        total += e;
        row_deltas += e * load(ds_row + j);
        store(p_row + j, e);
      }
      partial[r] = total;
      partial_deltas[r] = row_deltas;
    }
    fold_all<add>(partial, rows, totals);
    fold_all<add>(partial_deltas, rows, deltas);
    for (int64_t r = 0; r < rows; ++r) {
      float* p_row = p + r * stride;
      float* ds_row = ds + r * stride;
      const Vec inverse = splat(1.f / totals[r]), delta = deltas[r] * inverse - (dlse ? dlse[row + r] : 0.f);
      for (int64_t j = 0; j < padded; j += kLanes) {
        const Vec probability = load(p_row + j) * inverse;
        store(ds_row + j, probability * (load(ds_row + j) - delta));
        store(p_row + j, a.dropout.threshold ? probability * load(keep + r * keep_stride + j) : probability);
      }
    }
    multiply(ds, stride, keys, dqueries, rows, dim, length, false);
    narrow(dqueries, rows, dim, a.scale, dq + row * a.grad_stride, a.grad_stride);
    multiply<true>(ds, stride, queries, dkeys, length, dim, rows, row > 0);
    multiply<true>(p, stride, douts, dvalues, length, dim, rows, row > 0);
  }
  narrow(dkeys, length, dim, 1.f, dk, a.grad_stride);
  narrow(dvalues, length, dim, 1.f, dv, a.grad_stride);
}

void attention_forward(const Attention& a, bool bf16, const AttentionTask& task, float* scratch) {
  bf16 ? attention_forward_task<bfloat16>(a, task, scratch) : attention_forward_task<float>(a, task, scratch);
}

void attention_backward(const Attention& a, bool bf16, const AttentionTask& task, float* scratch) {
  bf16 ? attention_backward_task<bfloat16>(a, task, scratch) : attention_backward_task<float>(a, task, scratch);
}
