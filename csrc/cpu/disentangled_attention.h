// The terms of relative positions in attention's scores, for a block of query rows at a time.
//
// q . keys: the product of the block's queries with the distances that it needs has in row r the scores of key j at
// column j + rows - 1 - r. k . queries: the product of kLanes keys with the distances that they and the block need has
// in row j the score of query r at column j + rows - 1 - r: read with a row stride that is greater by one, it is the
// transpose of the scores. The backward writes the scores' gradients into the same places of matrices of zeros.

class PositionScores {
 public:
  // scratch: position_scratch() floats.
  PositionScores(const Attention& a, const AttentionTask& task, float* scratch)
      : a_(a), t_(a.positions), head_(task.head), length_(task.length_k), dim_(a.head_dim) {
    product_ = scratch;
    tile_ = product_ + kAttentionRows * product_stride();
    widened_ = tile_ + kLanes * kTileStride;
  }

  // The keys' rows, widened here or by the caller.
  template <class T>
  void widen_keys(const T* k) {
    if (!t_->queries_t) return;
    widen(k, a_.k.token_stride, length_, dim_, 1.f, widened_);
    keys_ = widened_;
  }
  void read_keys(const float* keys) { keys_ = keys; }

  // Adds the terms to the scores of rows [row, row + rows), whose scaled queries are given. Scores past the last key,
  // up to a whole vector, become anything.
  void add_to(float* scores, int64_t stride, const float* queries, int64_t row, int64_t rows) {
    if (t_->keys_t) {
      multiply_columns(
          queries, transposed(t_->keys_t) + first_distance(row, rows), product_, product_stride(), rows,
          length_ + rows - 1);
      for (int64_t r = 0; r < rows; ++r) {
        const float* of_row = product_ + r * product_stride() + rows - 1 - r;
        float* target = scores + r * stride;
        for (int64_t j = 0; j < length_; j += kLanes) store(target + j, load(target + j) + load(of_row + j));
      }
    }
    if (!t_->queries_t) return;
    for (int64_t j = 0; j < length_; j += kLanes) {
      const float* table = transposed(t_->queries_t) + first_distance(row, rows) + j;
      multiply_columns(keys_ + j * dim_, table, tile_, kTileStride, group(j), rows + kLanes - 1);
      for (int64_t c = 0; c < rows; c += kLanes) {
        Vec block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) block[i] = load(tile_ + i * (kTileStride + 1) + c);
        transpose(block);
        for (int i = 0; i < kLanes && c + i < rows; ++i) {
          float* target = scores + (rows - 1 - c - i) * stride + j;
          store(target, load(target) + block[i]);
        }
      }
    }
  }

  // From the gradients of a block's scores, which are 0 past the last key: adds to those of the queries, not yet
  // scaled, and of the tables' keys.
  void add_query_gradients(
      const float* ds, int64_t stride, const float* queries, float* dqueries, int64_t row, int64_t rows) {
    if (!t_->keys) return;
    const int64_t width = product_stride(), count = length_ + rows - 1, first = first_distance(row, rows);
    __builtin_memset(product_, 0, rows * width * sizeof(float));
    for (int64_t r = 0; r < rows; ++r)
      __builtin_memcpy(product_ + r * width + rows - 1 - r, ds + r * stride, length_ * sizeof(float));
    multiply(product_, width, by_rows(t_->keys) + first * dim_, dqueries, rows, dim_, count, true);
    multiply<true>(product_, width, queries, t_->dkeys + first * dim_, count, dim_, rows, true);
  }

  // Adds to the gradients of the keys and of the tables' queries, which lack the factor `scale`.
  void add_key_gradients(const float* ds, int64_t stride, float* dkeys, int64_t row, int64_t rows) {
    if (!t_->queries) return;
    __builtin_memset(tile_, 0, kLanes * kTileStride * sizeof(float));
    for (int64_t j = 0; j < length_; j += kLanes) {
      for (int64_t c = 0; c < rows; c += kLanes) {
        Vec block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
          block[i] = c + i < rows ? load(ds + (rows - 1 - c - i) * stride + j) : Vec{};
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(tile_ + i * (kTileStride + 1) + c, block[i]);
      }
      const int64_t first = first_distance(row, rows) + j, count = rows + group(j) - 1;
      multiply(
          tile_, kTileStride, by_rows(t_->queries) + first * dim_, dkeys + j * dim_, group(j), dim_, count, true);
      multiply<true>(
          tile_, kTileStride, keys_ + j * dim_, t_->dqueries + first * dim_, count, dim_, group(j), true);
    }
  }

 private:
  static constexpr int64_t kTileStride = kAttentionRows + kLanes;

  int64_t product_stride() const { return padded_length(length_ + kAttentionRows) + kLanes; }
  int64_t group(int64_t j) const { return length_ - j < kLanes ? length_ - j : kLanes; }
  // The row of the smallest distance of a block: that of its last query to key 0.
  int64_t first_distance(int64_t row, int64_t rows) const { return t_->longest - row - rows; }
  const float* transposed(const float* table) const { return table + head_ * dim_ * t_->stride; }
  const float* by_rows(const float* table) const { return table + head_ * t_->stride * dim_; }

  // C (rows x columns, rounded up to whole vectors) = A times columns of a transposed table.
  void multiply_columns(
      const float* a, const float* table, float* c, int64_t ldc, int64_t rows, int64_t columns) const {
    const int64_t padded = padded_length(columns);
    for (int64_t j = 0; j < padded; j += kPanel)
      multiply_panel(a, dim_, table + j, t_->stride, c + j, ldc, rows, panel_width(padded - j), dim_, false);
  }

  const Attention& a_;
  const PositionTables* t_;
  int64_t head_, length_, dim_;
  float *product_, *tile_, *widened_;
  const float* keys_ = nullptr;
};
