// One (sequence, head) at a time. Operands are widened to float once, and keys (in the backward values too) are
// transposed, so that every product is C (+)= A B with B's columns contiguous: one family of register tiles serves all
// of them. Scores exist only for a block of query rows and the keys that one of these rows sees. The backward computes
// them again instead of reading them back, so nothing of size length x length is ever stored.

static_assert(kAttentionRows % kLanes == 0);

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

// Lane-wise maxima of `length` scores. Scores past the end, up to a whole vector, become -inf.
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

template <class T>
static void clear_rows(T* target, int64_t stride, int64_t rows, int64_t head_dim) {
  for (int64_t i = 0; i < rows; ++i) __builtin_memset(target + i * stride, 0, head_dim * sizeof(T));
}

// The keys that query `row` of a task sees: [first_visible, end_visible), empty if first_visible >= end_visible.
FASTENC_INLINE int64_t first_visible(const Attention& a, const AttentionTask& task, int64_t row) {
  const int64_t first = row + task.length_k - task.length_q - a.window_left;
  return a.window_left < 0 || first < 0 ? 0 : first;
}
FASTENC_INLINE int64_t end_visible(const Attention& a, const AttentionTask& task, int64_t row) {
  const int64_t end = row + task.length_k - task.length_q + a.window_right + 1;
  return a.window_right < 0 || end > task.length_k ? task.length_k : end;
}

// Rotates `count` widened queries or keys, the first of them at `position`. Does nothing without a table.
FASTENC_INLINE void rotate(const Attention& a, float* rows, int64_t count, int64_t position, bool inverse) {
  if (!a.rotary) return;
  for (int64_t i = 0; i < count; ++i) {
    float* row = rows + i * a.head_dim;
    rotate_row(row, row, a.rotary + (position + i) * a.rotary_dim, a.rotary_dim / 2, inverse);
  }
}

// RMSNorm of `count` widened queries or keys, times `factor`.
static void normalise_heads(const Attention& a, const float* weight, float factor, float* rows, int64_t count) {
  const int64_t dim = a.head_dim;
  for (float* row = rows; row < rows + count * dim; row += dim) {
    Vec squares{};
    for (int64_t d = 0; d < dim; d += kLanes) squares += load(row + d) * load(row + d);
    const float mean = sum(squares) / (float)dim;
    const Vec scale = splat(factor / __builtin_sqrtf(mean + a.head_norm_eps));
    for (int64_t d = 0; d < dim; d += kLanes) store(row + d, load(row + d) * scale * load(weight + d));
  }
}

// Widens queries, the first of them at `position`: scaled, normalised and rotated.
template <class T>
static void read_queries(const Attention& a, const T* q, int64_t rows, int64_t position, float* queries) {
  widen(q, a.q.token_stride, rows, a.head_dim, a.query_norm ? 1.f : a.scale, queries);
  if (a.query_norm) normalise_heads(a, a.query_norm, a.scale, queries, rows);
  rotate(a, queries, rows, position, false);
}

// Whether read_keys changes the keys.
FASTENC_INLINE bool changes_keys(const Attention& a) { return a.rotary || a.key_norm; }

// Widens all keys of a task: normalised and rotated.
template <class T>
static void read_keys(const Attention& a, const T* k, int64_t length, float* keys) {
  widen(k, a.k.token_stride, length, a.head_dim, 1.f, keys);
  if (a.key_norm) normalise_heads(a, a.key_norm, 1.f, keys, length);
  rotate(a, keys, length, 0, false);
}

// The biases and the window of a task's scores, expanded once so that a row adds whole vectors.
class ScoreBias {
 public:
  static int64_t floats(int64_t length_q, int64_t length_k) { return length_q + 2 * length_k + 256; }

  ScoreBias(const Attention& a, const AttentionTask& task, float* scratch)
      : a_(a), task_(task), windowed_(a.window_left >= 0 || a.window_right >= 0) {
    if (a.key_bias) {
      __builtin_memcpy(scratch, a.key_bias + task.first_k, task.length_k * sizeof(float));
      of_keys_ = scratch;
    }
    if (!a.alibi_slopes && !a.relative_bias) return;
    float* bias = scratch + padded_length(task.length_k);
    const int64_t radius = a.relative_radius;
    const float slope = a.alibi_slopes ? a.alibi_slopes[task.head] : 0.f;
    const float* table = a.relative_bias ? a.relative_bias + task.head * (2 * radius + 1) + radius : nullptr;
    for (int64_t i = 0; i < task.length_q + task.length_k - 1; ++i) {
      const int64_t distance = i - (task.length_k - 1), size = distance < 0 ? -distance : distance;
      const int64_t clamped = distance < -radius ? -radius : distance > radius ? radius : distance;
      bias[i] = (table ? table[clamped] : 0.f) - slope * (float)size;
    }
    of_distances_ = bias;
  }

  bool windowed() const { return windowed_; }
  bool changes_scores() const { return windowed_ || of_keys_ || of_distances_; }

  // The index of a row's distance to key 0 among all distances of the task.
  int64_t distance_index(int64_t row) const { return task_.length_q - 1 - row; }

  // Adds the biases to one row's scores of keys [first, first + count). Sets the scores of keys that the row does not
  // see, up to a whole vector, to -inf. Returns lane-wise maxima. Not inlined: inlining slowed down rows without
  // biases.
  __attribute__((noinline)) Vec add_to(float* scores, int64_t row, int64_t first, int64_t count) const {
    const float* by_distance = of_distances_ ? of_distances_ + distance_index(row) + first : nullptr;
    const int32_t begin = (int32_t)(first_visible(a_, task_, row) - first);
    const int32_t end = (int32_t)(end_visible(a_, task_, row) - first);
    const Vec hidden = splat(-__builtin_inff());
    Vec highest = hidden;
    for (int64_t j = 0; j < count; j += kLanes) {
      const VecI key = kLaneIndex + (int32_t)j;
      Vec score = load(scores + j);
      if (by_distance) score += load(by_distance + j);
      if (of_keys_) score += load(of_keys_ + first + j);
      score = (key >= begin) & (key < end) ? score : hidden;
      store(scores + j, score);
      highest = max(score, highest);
    }
    return highest;
  }

 private:
  const Attention& a_;
  const AttentionTask& task_;
  const bool windowed_;
  const float* of_keys_ = nullptr;
  const float* of_distances_ = nullptr;
};

// The keys that any row of a block sees, extended to the start of a panel.
struct VisibleKeys {
  int64_t first, count;
  int64_t near;     // columns of scores of these keys, up to a whole vector
  int64_t columns;  // and with those of the global keys, which follow

  VisibleKeys(const Attention& a, const AttentionTask& task, int64_t row, int64_t rows) {
    first = first_visible(a, task, row) / kPanel * kPanel;
    count = end_visible(a, task, row + rows - 1) - first;
    near = padded_length(count);
    columns = near + padded_length(task.num_global_keys);
  }
};

// The most columns of scores that a row of a task has.
FASTENC_INLINE int64_t most_columns(const AttentionTask& task) {
  return padded_length(task.length_k) + padded_length(task.num_global_keys);
}

FASTENC_INLINE void row_dropout(
    const Attention& a, const AttentionTask& task, int64_t row, const VisibleKeys& seen, float* keep) {
  const uint32_t head = (uint32_t)task.head, query = (uint32_t)(task.first_q + row);
  dropout_scales(a.dropout, head, query, seen.count, keep, seen.first);
  dropout_scales(a.global_dropout, head, query, task.num_global_keys, keep + seen.near);
}

// Widens the rows of the global keys.
template <class T>
static void widen_globals(const PackedHeads& x, const AttentionTask& task, int64_t head, int64_t dim, float* target) {
  for (int64_t g = 0; g < task.num_global_keys; ++g)
    widen(rows_of<T>(x, task.global_keys[g], head), x.token_stride, 1, dim, 1.f, target + g * dim);
}

template <class T>
static void attention_forward_task(const Attention& a, const AttentionTask& task, float* scratch) {
  const int64_t dim = a.head_dim, length = task.length_k, globals = task.num_global_keys;
  const int64_t out_stride = a.num_heads * dim, key_head = task.head / a.group;
  const T* q = rows_of<T>(a.q, task.first_q, task.head);
  T* out = (T*)a.out + task.first_q * out_stride + task.head * dim;
  float* lse = a.lse + task.head * a.total_q + task.first_q;
  float* keys = scratch;  // transposed, in panels
  float* global_keys = keys + panels_length(length) * dim;
  float* values = global_keys + panels_length(globals) * dim;
  float* global_values = values + length * dim;
  float* scores = global_values + globals * dim;
  float* queries = scores + kAttentionRows * scores_stride(most_columns(task));
  float* result = queries + kAttentionRows * dim;
  float* keep = result + kAttentionRows * dim;
  float* bias_scratch = keep + dropout_room(most_columns(task));
  const ScoreBias bias(a, task, bias_scratch);
  const T* k = rows_of<T>(a.k, task.first_k, key_head);
  PositionScores positions(a, task, bias_scratch + ScoreBias::floats(task.length_q, length));
  if (a.positions) positions.widen_keys(k);
  if (changes_keys(a)) {
    float* changed = values;  // free until the values are widened
    read_keys(a, k, length, changed);
    widen_transposed(changed, dim, length, dim, keys);
  } else {
    widen_transposed(k, a.k.token_stride, length, dim, keys);
  }
  widen(rows_of<T>(a.v, task.first_k, key_head), a.v.token_stride, length, dim, 1.f, values);
  widen_globals<T>(a.k, task, key_head, dim, global_values);  // free until the values are widened
  widen_transposed(global_values, dim, globals, dim, global_keys);
  widen_globals<T>(a.v, task, key_head, dim, global_values);
  for (int64_t row = 0; row < task.length_q; row += kAttentionRows) {
    const int64_t left = task.length_q - row, rows = left < kAttentionRows ? left : kAttentionRows;
    const VisibleKeys seen(a, task, row, rows);
    if (seen.count <= 0) {
      clear_rows(out + row * out_stride, out_stride, rows, dim);
      for (int64_t r = 0; r < rows; ++r) lse[row + r] = -__builtin_inff();
      continue;
    }
    const int64_t columns = seen.columns, stride = scores_stride(columns);
    read_queries(a, q + row * a.q.token_stride, rows, row, queries);
    multiply_panels(queries, dim, keys + seen.first * dim, scores, stride, rows, seen.near, dim);
    multiply_panels(queries, dim, global_keys, scores + seen.near, stride, rows, columns - seen.near, dim);
    if (a.positions) positions.add_to(scores, stride, queries, row, rows);
    Vec partial[kAttentionRows];
    float row_max[kAttentionRows], row_sums[kAttentionRows];
    for (int64_t r = 0; r < rows; ++r) {
      partial[r] = bias.changes_scores() ? bias.add_to(scores + r * stride, row + r, seen.first, seen.count)
                                         : row_maxima(scores + r * stride, seen.count);
      if (globals) partial[r] = max(partial[r], row_maxima(scores + r * stride + seen.near, globals));
    }
    fold_all<max>(partial, rows, row_max);
    for (int64_t r = 0; r < rows; ++r) {
      float* p = scores + r * stride;
      const Vec top = splat(row_max[r] == -__builtin_inff() ? 0.f : row_max[r]);  // inf - inf would be NaN
      Vec row_sum{};
      for (int64_t j = 0; j < columns; j += kLanes) {
        // Subtract before multiplying: where scores are large, s * log2(e) is rounded by more than the difference.
        const Vec e = exp2_of_negative((load(p + j) - top) * kLog2E);
        row_sum += e;
        store(p + j, e);
      }
      partial[r] = row_sum;
      if (a.dropout.threshold) {
        row_dropout(a, task, row + r, seen, keep);
        for (int64_t j = 0; j < columns; j += kLanes) store(p + j, load(p + j) * load(keep + j));
      }
    }
    fold_all<add>(partial, rows, row_sums);
    multiply(scores, stride, values + seen.first * dim, result, rows, dim, seen.count, false);
    multiply(scores + seen.near, stride, global_values, result, rows, dim, globals, true);
    for (int64_t r = 0; r < rows; ++r) {
      const float inverse = row_sums[r] == 0.f ? 0.f : 1.f / row_sums[r];
      narrow(result + r * dim, 1, dim, inverse, out + (row + r) * out_stride, dim);
      lse[row + r] = row_max[r] + __builtin_logf(row_sums[r]);
    }
  }
}

// What the heads of q that share a head of k and v have in common in the backward.
struct KeyOperands {
  const float *keys, *keys_t, *values_t;  // of each key; transposed ones in panels
  float *dkeys, *dvalues;                 // sums over the queries
};

// The queries of one head: writes dq, and adds to dkeys and dvalues, or sets them if `first`.
template <class T>
static void attention_backward_queries(
    const Attention& a, const AttentionTask& task, const KeyOperands& of_keys, const KeyOperands& of_globals,
    bool first, float* scratch) {
  const int64_t dim = a.head_dim, length = task.length_k, globals = task.num_global_keys;
  const int64_t most = most_columns(task), scores_size = kAttentionRows * scores_stride(most);
  const int64_t keep_stride = dropout_room(most);
  const int64_t out_stride = a.num_heads * dim;
  const T* q = rows_of<T>(a.q, task.first_q, task.head);
  const T* dout = (const T*)a.dout + task.first_q * out_stride + task.head * dim;
  const float* lse = a.lse + task.head * a.total_q + task.first_q;
  const float* dlse = a.dlse ? a.dlse + task.head * a.total_q + task.first_q : nullptr;
  T* dq = (T*)a.dq + task.first_q * a.grad_stride + task.head * dim;
  float* queries = scratch;
  float* douts = queries + kAttentionRows * dim;
  float* dqueries = douts + kAttentionRows * dim;
  float* p = dqueries + kAttentionRows * dim;
  float* ds = p + scores_size;
  float* keep = ds + scores_size;
  float* ddistance = keep + kAttentionRows * keep_stride;
  const int64_t distances = task.length_q + length - 1;
  float* bias_scratch = ddistance + (a.ddistance ? distances + kLanes : 0);
  const ScoreBias bias(a, task, bias_scratch);
  PositionScores positions(a, task, bias_scratch + ScoreBias::floats(task.length_q, length));
  if (a.ddistance && distances > 0) __builtin_memset(ddistance, 0, (distances + kLanes) * sizeof(float));
  positions.read_keys(of_keys.keys);
  for (int64_t row = 0; row < task.length_q; row += kAttentionRows) {
    const int64_t left = task.length_q - row, rows = left < kAttentionRows ? left : kAttentionRows;
    const VisibleKeys seen(a, task, row, rows);
    if (seen.count <= 0) {
      clear_rows(dq + row * a.grad_stride, a.grad_stride, rows, dim);
      continue;
    }
    const int64_t near = seen.near, columns = seen.columns, stride = scores_stride(columns), start = seen.first * dim;
    read_queries(a, q + row * a.q.token_stride, rows, row, queries);
    widen(dout + row * out_stride, out_stride, rows, dim, 1.f, douts);
    multiply_panels(queries, dim, of_keys.keys_t + start, p, stride, rows, near, dim);
    multiply_panels(queries, dim, of_globals.keys_t, p + near, stride, rows, columns - near, dim);
    if (a.positions) positions.add_to(p, stride, queries, row, rows);
    multiply_panels(douts, dim, of_keys.values_t + start, ds, stride, rows, near, dim);
    multiply_panels(douts, dim, of_globals.values_t, ds + near, stride, rows, columns - near, dim);
    Vec partial[kAttentionRows], partial_sums[kAttentionRows];
    float deltas[kAttentionRows], sums[kAttentionRows];
    for (int64_t r = 0; r < rows; ++r) {
      float* p_row = p + r * stride;
      float* ds_row = ds + r * stride;
      float* keep_row = keep + r * keep_stride;
      if (bias.changes_scores())
        bias.add_to(p_row, row + r, seen.first, seen.count);
      else
        row_maxima(p_row, seen.count);  // only to hide the scores past the end
      if (globals) row_maxima(p_row + near, globals);
      if (a.dropout.threshold) {
        row_dropout(a, task, row + r, seen, keep_row);
        for (int64_t j = 0; j < columns; j += kLanes) store(ds_row + j, load(ds_row + j) * load(keep_row + j));
      }
      const bool blind = lse[row + r] == -__builtin_inff();  // sees no key, so every probability is exp(-inf)
      const Vec row_lse = splat(blind ? __builtin_inff() : lse[row + r]);
      Vec delta{}, sum{};
      for (int64_t j = 0; j < columns; j += kLanes) {
        const Vec probability = exp2_of_negative((load(p_row + j) - row_lse) * kLog2E);
        delta += probability * load(ds_row + j);
        sum += probability;
        store(p_row + j, probability);
      }
      partial[r] = delta;
      partial_sums[r] = sum;
    }
    fold_all<add>(partial, rows, deltas);
    fold_all<add>(partial_sums, rows, sums);
    for (int64_t r = 0; r < rows; ++r) {
      float* p_row = p + r * stride;
      float* ds_row = ds + r * stride;
      const bool blind = lse[row + r] == -__builtin_inff();
      const float inverse = blind ? 0.f : 1.f / sums[r];
      const Vec delta = splat(blind ? 0.f : deltas[r] * inverse - (dlse ? dlse[row + r] : 0.f));
      for (int64_t j = 0; j < columns; j += kLanes) {
        const Vec probability = load(p_row + j) * inverse;
        store(ds_row + j, probability * (load(ds_row + j) - delta));
        store(p_row + j, a.dropout.threshold ? probability * load(keep + r * keep_stride + j) : probability);
      }
      if (a.ddistance) {
        float* of_distance = ddistance + bias.distance_index(row + r) + seen.first;
        for (int64_t j = 0; j < near; j += kLanes) store(of_distance + j, load(of_distance + j) + load(ds_row + j));
      }
    }
    multiply(ds, stride, of_keys.keys + start, dqueries, rows, dim, seen.count, false);
    multiply(ds + near, stride, of_globals.keys, dqueries, rows, dim, globals, true);
    rotate(a, dqueries, rows, row, true);
    if (a.positions) positions.add_query_gradients(ds, stride, queries, dqueries, row, rows);
    narrow(dqueries, rows, dim, a.scale, dq + row * a.grad_stride, a.grad_stride);
    multiply<true>(ds, stride, queries, of_keys.dkeys + start, seen.count, dim, rows, row || !first);
    if (a.positions) positions.add_key_gradients(ds, stride, of_keys.dkeys, row, rows);
    multiply<true>(p, stride, douts, of_keys.dvalues + start, seen.count, dim, rows, row || !first);
    if (!globals) continue;
    multiply<true>(ds + near, stride, queries, of_globals.dkeys, globals, dim, rows, row || !first);
    multiply<true>(p + near, stride, douts, of_globals.dvalues, globals, dim, rows, row || !first);
  }
  if (a.ddistance && task.length_q && length)
    __builtin_memcpy(
        a.ddistance + task.head * a.ddistance_stride + task.first_q + task.first_k, ddistance,
        distances * sizeof(float));
}

// p = exp(s - lse);  dv = drop(p)^T dout;  dp = drop(dout v^T);  ds = p (dp - sum_j p dp + dlse);
// dq = scale ds k;  dk = scale ds^T q.
// The sum over j equals out . dout, but `out` was rounded to its storage type, so the sum is computed here. exp(s -
// lse) carries lse's rounding error, which a large mean of dp would multiply. So p is divided by its sum; then the mean
// of dp has no effect on ds.
template <class T>
static void attention_backward_task(const Attention& a, const AttentionTask& task, float* scratch) {
  const int64_t dim = a.head_dim, length = task.length_k, globals = task.num_global_keys;
  const int64_t size = length * dim, panels_size = panels_length(length) * dim;
  const int64_t globals_size = globals * dim, globals_panels = panels_length(globals) * dim;
  const T* k = rows_of<T>(a.k, task.first_k, task.head);
  const T* v = rows_of<T>(a.v, task.first_k, task.head);
  T* dk = (T*)a.dk + task.first_k * a.key_grad_stride + task.head * dim;
  T* dv = (T*)a.dv + task.first_k * a.key_grad_stride + task.head * dim;
  float* keys_t = scratch;
  float* values_t = keys_t + panels_size + globals_panels;
  float* keys = values_t + panels_size + globals_panels;
  float* dkeys = keys + size + globals_size;
  float* dvalues = dkeys + size + globals_size;
  const KeyOperands of_keys{keys, keys_t, values_t, dkeys, dvalues};
  float* global_keys = keys + size;
  const KeyOperands of_globals{
      global_keys, keys_t + panels_size, values_t + panels_size, dkeys + size, dvalues + size};
  // Keys that no block reaches keep a gradient of 0; without a window the first block writes all of them.
  const bool set_by_first = a.window_left < 0 && a.window_right < 0 && task.length_q;
  if (!set_by_first) __builtin_memset(dkeys, 0, 2 * (size + globals_size) * sizeof(float));
  read_keys(a, k, length, keys);
  widen_transposed(keys, dim, length, dim, keys_t);
  widen_transposed(v, a.v.token_stride, length, dim, values_t);
  widen_globals<T>(a.v, task, task.head, dim, global_keys);  // free until the keys are widened
  widen_transposed(global_keys, dim, globals, dim, values_t + panels_size);
  widen_globals<T>(a.k, task, task.head, dim, global_keys);
  widen_transposed(global_keys, dim, globals, dim, keys_t + panels_size);
  for (int64_t member = 0; member < a.group; ++member) {
    AttentionTask of_head = task;
    of_head.head = task.head * a.group + member;
    attention_backward_queries<T>(
        a, of_head, of_keys, of_globals, set_by_first && !member, dvalues + size + globals_size);
  }
  for (int64_t g = 0; g < globals; ++g) {
    // No window has a global key, so its gradient there is 0.
    const int64_t row = (task.global_keys[g] - task.first_k) * dim, bytes = dim * sizeof(float);
    __builtin_memcpy(dkeys + row, of_globals.dkeys + g * dim, bytes);
    __builtin_memcpy(dvalues + row, of_globals.dvalues + g * dim, bytes);
  }
  rotate(a, dkeys, length, 0, true);
  narrow(dkeys, length, dim, 1.f, dk, a.key_grad_stride);
  narrow(dvalues, length, dim, 1.f, dv, a.key_grad_stride);
}

void attention_forward(const Attention& a, bool bf16, const AttentionTask& task, float* scratch) {
  bf16 ? attention_forward_task<bfloat16>(a, task, scratch) : attention_forward_task<float>(a, task, scratch);
}

void attention_backward(const Attention& a, bool bf16, const AttentionTask& task, float* scratch) {
  bf16 ? attention_backward_task<bfloat16>(a, task, scratch) : attention_backward_task<float>(a, task, scratch);
}
