// What attention's products read and write: rows widened to float, transposed into panels, and narrowed again.

// C (rows x columns) = A B, where B (depth x columns) is stored in panels of kPanel columns. The sums of kDepth terms are
// added to each other, because one sum of all 512 terms of the widest heads would be rounded twice as much.
static void multiply_panels(
    const float* a, int64_t lda, const float* panels, float* c, int64_t ldc, int64_t rows, int64_t columns,
    int64_t depth) {
  for (int64_t j = 0; j < columns; j += kPanel)
    for (int64_t k = 0; k < depth; k += kDepth)
      multiply_panel(
          a + k, lda, panels + j * depth + k * kPanel, kPanel, c + j, ldc, rows, panel_width(columns - j),
          depth - k < kDepth ? depth - k : kDepth, k > 0);
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

FASTENC_INLINE int64_t padded_length(int64_t length) { return (length + kLanes - 1) / kLanes * kLanes; }
FASTENC_INLINE int64_t panels_length(int64_t length) { return (length + kPanel - 1) / kPanel * kPanel; }
// Distance between rows of scores: never a multiple of the page size, where columns would share few cache sets.
FASTENC_INLINE int64_t scores_stride(int64_t length) { return padded_length(length) + 16; }

// The first row of a task's tokens.
template <class T>
FASTENC_INLINE const T* rows_of(const PackedHeads& x, int64_t first, int64_t head) {
  return (const T*)x.data + first * x.token_stride + head * x.head_stride;
}
