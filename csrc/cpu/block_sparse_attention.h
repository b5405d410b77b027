// One (sequence, head) at a time, with the products of attention.h. Scores exist for some rows of a block of queries and
// the keys that the plan names for it: the keys of one entry after the other, each entry in whole vectors. Runs of
// neighbouring blocks whose keys fill whole vectors are one product.

// The keys of consecutive entries that are neighbours both in the sequence and in the scores.
struct BlockRun {
  int64_t entry, key, count;  // first entry of the row of blocks, first key, number of keys
};

class BlockRow {
 public:
  BlockRow(const BlockSparseAttention& a, const BlockSparseTask& task, int64_t block)
      : a_(a), task_(task), first_(task.starts[block]), entries_(task.starts[block + 1] - first_) {}

  static int64_t slot(int64_t block_size) { return padded_length(block_size); }

  int64_t entries() const { return entries_; }
  int64_t width() const { return entries_ * slot(a_.block_size); }
  int64_t block(int64_t entry) const { return task_.columns[first_ + entry]; }
  int64_t keys(int64_t entry) const {
    const int64_t left = task_.length - block(entry) * a_.block_size;
    return left < a_.block_size ? left : a_.block_size;
  }

  template <class Run>
  void for_each_run(const Run& run) const {
    const bool whole = slot(a_.block_size) == a_.block_size;
    for (int64_t e = 0; e < entries_;) {
      BlockRun neighbours{e, block(e) * a_.block_size, keys(e)};
      for (++e; whole && e < entries_ && block(e) == block(e - 1) + 1; ++e) neighbours.count += keys(e);
      run(neighbours);
    }
  }

  // Adds the logarithms of the counts to a row's scores; scores past an entry's keys become -inf. Returns lane-wise
  // maxima.
  Vec complete(float* scores) const {
    const Vec hidden = splat(-__builtin_inff());
    Vec highest = hidden;
    for (int64_t e = 0; e < entries_; ++e, scores += slot(a_.block_size)) {
      const int32_t count = task_.counts[first_ + e];
      const Vec bias = splat(count == 1 ? 0.f : __builtin_logf((float)count));
      const int64_t inside = keys(e);
      for (int64_t j = 0; j < slot(a_.block_size); j += kLanes) {
        Vec score = load(scores + j) + bias;
        if (j + kLanes > inside) score = kLaneIndex + (int32_t)j < (int32_t)inside ? score : hidden;
        store(scores + j, score);
        highest = max(score, highest);
      }
    }
    return highest;
  }

 private:
  const BlockSparseAttention& a_;
  const BlockSparseTask& task_;
  int64_t first_, entries_;
};

// The transposed rows of each block, in panels that begin with the block.
template <class T>
static void widen_blocks(
    const T* source, int64_t stride, const BlockSparseTask& task, int64_t block_size, int64_t dim, float* panels) {
  for (int64_t row = 0; row < task.length; row += block_size) {
    const int64_t left = task.length - row, rows = left < block_size ? left : block_size;
    widen_transposed(source + row * stride, stride, rows, dim, panels);
    panels += panels_length(block_size) * dim;
  }
}

// The scores of some rows of a block, or the like products of output gradients and values.
FASTENC_INLINE void multiply_blocks(
    const BlockSparseAttention& a, const BlockRow& row, const float* rows, int64_t count, const float* panels,
    float* result, int64_t stride) {
  const int64_t slot = BlockRow::slot(a.block_size), size = panels_length(a.block_size) * a.head_dim;
  for (int64_t e = 0; e < row.entries(); ++e) {
    const int64_t columns = padded_length(row.keys(e));
    multiply_panels(
        rows, a.head_dim, panels + row.block(e) * size, result + e * slot, stride, count, columns, a.head_dim);
  }
}

// Calls run(row, first, rows) for parts of each block of queries, first: the first query, with at most kAttentionRows
// rows and nearly the same number.
template <class Run>
FASTENC_INLINE void for_each_part(const BlockSparseAttention& a, const BlockSparseTask& task, const Run& run) {
  for (int64_t start = 0, block = 0; start < task.length; start += a.block_size, ++block) {
    const int64_t left = task.length - start, size = left < a.block_size ? left : a.block_size;
    const BlockRow row(a, task, block);
    const int64_t parts = (size + kAttentionRows - 1) / kAttentionRows, most = (size + parts - 1) / parts;
    for (int64_t r = 0; r < size; r += most) run(row, start + r, size - r < most ? size - r : most);
  }
}

template <class T>
static void block_sparse_forward_task(const BlockSparseAttention& a, const BlockSparseTask& task, float* scratch) {
  const int64_t dim = a.head_dim, out_stride = a.num_heads * dim, slot = BlockRow::slot(a.block_size);
  const T* q = rows_of<T>(a.q, task.first, task.head);
  T* out = (T*)a.out + task.first * out_stride + task.head * dim;
  float* lse = a.lse + task.head * a.total_tokens + task.first;
  const int64_t blocks = (task.length + a.block_size - 1) / a.block_size;
  float* keys = scratch;  // transposed, in panels
  float* values = keys + blocks * panels_length(a.block_size) * dim;
  float* queries = values + task.length * dim;
  float* result = queries + kAttentionRows * dim;
  float* scores = result + kAttentionRows * dim;
  widen_blocks(rows_of<T>(a.k, task.first, task.head), a.k.token_stride, task, a.block_size, dim, keys);
  widen(rows_of<T>(a.v, task.first, task.head), a.v.token_stride, task.length, dim, 1.f, values);
  for_each_part(a, task, [&](const BlockRow& row, int64_t first, int64_t rows) {
    const int64_t width = row.width(), stride = scores_stride(width);
    if (!row.entries()) {
      clear_rows(out + first * out_stride, out_stride, rows, dim);
      for (int64_t r = 0; r < rows; ++r) lse[first + r] = -__builtin_inff();
      return;
    }
    widen(q + first * a.q.token_stride, a.q.token_stride, rows, dim, a.scale, queries);
    multiply_blocks(a, row, queries, rows, keys, scores, stride);
    Vec partial[kAttentionRows];
    float row_max[kAttentionRows], row_sums[kAttentionRows];
    for (int64_t r = 0; r < rows; ++r) partial[r] = row.complete(scores + r * stride);
    fold_all<max>(partial, rows, row_max);
    for (int64_t r = 0; r < rows; ++r) {
      float* p = scores + r * stride;
      const Vec top = splat(row_max[r] == -__builtin_inff() ? 0.f : row_max[r]);  // inf - inf would be NaN
      Vec row_sum{};
      for (int64_t j = 0; j < width; j += kLanes) {
        const Vec e = exp2_of_negative((load(p + j) - top) * kLog2E);
        row_sum += e;
        store(p + j, e);
      }
      partial[r] = row_sum;
    }
    fold_all<add>(partial, rows, row_sums);
    row.for_each_run([&](const BlockRun& run) {
      multiply(
          scores + run.entry * slot, stride, values + run.key * dim, result, rows, dim, run.count, run.entry > 0);
    });
    for (int64_t r = 0; r < rows; ++r) {
      narrow(result + r * dim, 1, dim, 1.f / row_sums[r], out + (first + r) * out_stride, dim);
      lse[first + r] = row_max[r] + __builtin_logf(row_sums[r]);
    }
  });
}

// The formulas of attention's backward; as there, p is divided by its sum.
template <class T>
static void block_sparse_backward_task(const BlockSparseAttention& a, const BlockSparseTask& task, float* scratch) {
  const int64_t dim = a.head_dim, out_stride = a.num_heads * dim, slot = BlockRow::slot(a.block_size);
  const T* q = rows_of<T>(a.q, task.first, task.head);
  const T* k = rows_of<T>(a.k, task.first, task.head);
  const T* dout = (const T*)a.dout + task.first * out_stride + task.head * dim;
  const float* lse = a.lse + task.head * a.total_tokens + task.first;
  const int64_t offset = task.first * a.grad_stride + task.head * dim;
  T *dq = (T*)a.dq + offset, *dk = (T*)a.dk + offset, *dv = (T*)a.dv + offset;
  const int64_t blocks = (task.length + a.block_size - 1) / a.block_size, size = task.length * dim;
  const int64_t panels_size = blocks * panels_length(a.block_size) * dim;
  float* keys_t = scratch;
  float* values_t = keys_t + panels_size;
  float* keys = values_t + panels_size;
  float* dkeys = keys + size;
  float* dvalues = dkeys + size;
  float* queries = dvalues + size;
  float* douts = queries + kAttentionRows * dim;
  float* dqueries = douts + kAttentionRows * dim;
  float* scores = dqueries + kAttentionRows * dim;
  __builtin_memset(dkeys, 0, 2 * size * sizeof(float));
  widen(k, a.k.token_stride, task.length, dim, 1.f, keys);
  widen_blocks(keys, dim, task, a.block_size, dim, keys_t);
  widen_blocks(rows_of<T>(a.v, task.first, task.head), a.v.token_stride, task, a.block_size, dim, values_t);
  for_each_part(a, task, [&](const BlockRow& row, int64_t first, int64_t rows) {
    const int64_t width = row.width(), stride = scores_stride(width);
    if (!row.entries()) {
      clear_rows(dq + first * a.grad_stride, a.grad_stride, rows, dim);
      return;
    }
    float *p = scores, *ds = p + kAttentionRows * stride;
    widen(q + first * a.q.token_stride, a.q.token_stride, rows, dim, a.scale, queries);
    widen(dout + first * out_stride, out_stride, rows, dim, 1.f, douts);
    multiply_blocks(a, row, queries, rows, keys_t, p, stride);
    multiply_blocks(a, row, douts, rows, values_t, ds, stride);
    Vec partial[kAttentionRows], partial_sums[kAttentionRows];
    float deltas[kAttentionRows], sums[kAttentionRows];
    for (int64_t r = 0; r < rows; ++r) {
      float *p_row = p + r * stride, *ds_row = ds + r * stride;
      row.complete(p_row);
      const Vec row_lse = splat(lse[first + r]);
      Vec delta{}, sum{};
      for (int64_t j = 0; j < width; j += kLanes) {
        const Vec score = load(p_row + j);
        const Vec probability = exp2_of_negative((score - row_lse) * kLog2E);
        // Products past an entry's keys were not computed.
        const Vec dp = score == splat(-__builtin_inff()) ? Vec{} : load(ds_row + j);
        delta += probability * dp;
        sum += probability;
        store(p_row + j, probability);
        store(ds_row + j, dp);
      }
      partial[r] = delta;
      partial_sums[r] = sum;
    }
    fold_all<add>(partial, rows, deltas);
    fold_all<add>(partial_sums, rows, sums);
    for (int64_t r = 0; r < rows; ++r) {
      float *p_row = p + r * stride, *ds_row = ds + r * stride;
      const float inverse = 1.f / sums[r];
      const Vec delta = splat(deltas[r] * inverse);
      for (int64_t j = 0; j < width; j += kLanes) {
        const Vec probability = load(p_row + j) * inverse;
        store(ds_row + j, probability * (load(ds_row + j) - delta));
        store(p_row + j, probability);
      }
    }
    row.for_each_run([&](const BlockRun& run) {
      const float *ds_run = ds + run.entry * slot, *p_run = p + run.entry * slot;
      multiply(ds_run, stride, keys + run.key * dim, dqueries, rows, dim, run.count, run.entry > 0);
      multiply<true>(ds_run, stride, queries, dkeys + run.key * dim, run.count, dim, rows, true);
      multiply<true>(p_run, stride, douts, dvalues + run.key * dim, run.count, dim, rows, true);
    });
    narrow(dqueries, rows, dim, a.scale, dq + first * a.grad_stride, a.grad_stride);
  });
  narrow(dkeys, task.length, dim, 1.f, dk, a.grad_stride);
  narrow(dvalues, task.length, dim, 1.f, dv, a.grad_stride);
}

void block_sparse_forward(const BlockSparseAttention& a, bool bf16, const BlockSparseTask& task, float* scratch) {
  bf16 ? block_sparse_forward_task<bfloat16>(a, task, scratch) : block_sparse_forward_task<float>(a, task, scratch);
}

void block_sparse_backward(const BlockSparseAttention& a, bool bf16, const BlockSparseTask& task, float* scratch) {
  bf16 ? block_sparse_backward_task<bfloat16>(a, task, scratch) : block_sparse_backward_task<float>(a, task, scratch);
}
