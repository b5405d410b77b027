// A panel of B, kDepth x kPanel, is packed into the nearest cache and meets every row of the task; C collects the sums
// of each kDepth terms, in their order, so that an element does not depend on columns or threads beside it.

constexpr int64_t kEdgeRows = 48;  // of the buffer in C's place where its columns end inside a vector

// panel[k][c] = B[first_k + k][left + c]; columns up to the next multiple of kLanes are 0.
template <class T>
static void pack_panel(const Gemm& m, int64_t first_k, int64_t depth, int64_t left, int64_t columns, float* panel) {
  const T* b = (const T*)m.b + first_k * m.b_depth + left * m.b_column;
  for (int64_t c = 0; c < columns; c += kLanes) {
    const int width = columns - c < kLanes ? columns - c : kLanes;
    if (m.b_column == 1) {
      for (int64_t k = 0; k < depth; ++k) store(panel + k * kPanel + c, load_n(b + k * m.b_depth + c, width));
      continue;
    }
    for (int64_t k = 0; k < depth; k += kLanes) {
      const int count = depth - k < kLanes ? depth - k : kLanes;
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = i < width ? load_n(b + (c + i) * m.b_column + k, count) : Vec{};
      transpose(block);
      for (int i = 0; i < count; ++i) store(panel + (k + i) * kPanel + c, block[i]);
    }
  }
}

// C's rows [first, last) += or = A's times the panel.
template <bool kTransposed>
static void multiply_by_panel(
    const Gemm& m, int64_t first_k, int64_t depth, const float* panel, int64_t first, int64_t last, int64_t left,
    int64_t columns, bool add) {
  // The next of packed panels lies behind this one. One that was packed here is followed by none that is ready, but
  // its first product may find C in memory.
  const float* ahead = m.packed_b ? panel + depth * kPanel : first_k || m.bias ? panel : nullptr;
  const int64_t lda = kTransposed ? m.a_depth : m.a_row;
  const float* a = m.a + first * m.a_row + first_k * m.a_depth;
  float* c = m.c + first * m.columns + left;
  if (columns % kLanes == 0) {
    multiply_panel<kTransposed>(a, lda, panel, kPanel, c, m.columns, last - first, columns, depth, add, ahead);
    return;
  }
  alignas(64) float edge[kEdgeRows * kPanel];
  const int64_t padded = (columns + kLanes - 1) / kLanes * kLanes;
  for (int64_t row = 0; row < last - first; row += kEdgeRows) {
    const int64_t left_over = last - first - row, rows = left_over < kEdgeRows ? left_over : kEdgeRows;
    for (int64_t r = 0; add && r < rows; ++r)
      __builtin_memcpy(edge + r * kPanel, c + (row + r) * m.columns, columns * sizeof(float));
    multiply_panel<kTransposed>(a + row * m.a_row, lda, panel, kPanel, edge, kPanel, rows, padded, depth, add, ahead);
    for (int64_t r = 0; r < rows; ++r)
      __builtin_memcpy(c + (row + r) * m.columns, edge + r * kPanel, columns * sizeof(float));
  }
}

void gemm_block(const Gemm& m, int64_t first, int64_t last, int64_t left, int64_t right) {
  alignas(64) float packed[kDepth * kPanel];
  const float* panel = packed;
  for (int64_t j = left; j < right; j += kPanel) {
    const int64_t columns = panel_width(right - j);
    if (m.bias) fill_with_bias(m.bias + j, columns, m.c + first * m.columns + j, m.columns, last - first);
    for (int64_t k = 0; k < m.depth; k += kDepth) {
      const int64_t depth = m.depth - k < kDepth ? m.depth - k : kDepth;
      const bool add = m.add || m.bias || k;
      if (m.packed_b)
        panel = panel_at(m.packed_b, m.depth, k, j);
      else if (m.b_bf16)
        pack_panel<bfloat16>(m, k, depth, j, columns, packed);
      else
        pack_panel<float>(m, k, depth, j, columns, packed);
      if (m.a_depth == 1)
        multiply_by_panel<false>(m, k, depth, panel, first, last, j, columns, add);
      else
        multiply_by_panel<true>(m, k, depth, panel, first, last, j, columns, add);
    }
  }
}

// Of a few rows every weight is used a few times only, so none is packed: each output is a dot product of rows that
// lie contiguously, and kDotOutputs rows of W stay in the nearest cache while they meet all rows of A.

constexpr int kDotRows = kLanes == 16 ? 6 : kLanes == 8 ? 2 : 3;  // with kDotOutputs, as many sums as registers hold
constexpr int kDotOutputs = 4;

template <int kRows, int kOutputs, class T>
static void dot_tile(const GemmFewRows& m, int64_t row, int64_t output) {
  constexpr int kSums = (kRows * kOutputs + kLanes - 1) / kLanes * kLanes;
  const float* a = m.a + row * m.depth;
  const T* weight = (const T*)m.weight + output * m.weight_stride;
  Vec sums[kSums];
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) sums[i] = Vec{};
  auto step = [&](int64_t k, int n) __attribute__((always_inline)) {
    Vec w[kOutputs];
#pragma GCC unroll 4
    for (int o = 0; o < kOutputs; ++o) w[o] = load_n(weight + o * m.weight_stride + k, n);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec x = load_n(a + r * m.depth + k, n);
#pragma GCC unroll 4
      for (int o = 0; o < kOutputs; ++o) sums[r * kOutputs + o] += x * w[o];
    }
  };
  FASTENC_FOR_COLUMNS(m.depth, step);
  alignas(64) float totals[kSums];
#pragma GCC unroll 8
  for (int i = 0; i < kSums; i += kLanes) store(totals + i, fold_rows<add>(sums + i));
  for (int r = 0; r < kRows; ++r)
    for (int o = 0; o < kOutputs; ++o)
      m.c[(row + r) * m.columns + output + o] = totals[r * kOutputs + o] + (m.bias ? m.bias[output + o] : 0.f);
}

template <int kOutputs, class T>
static void dot_rows(const GemmFewRows& m, int64_t output) {
  int64_t row = 0;
  for (; row + kDotRows <= m.rows; row += kDotRows) dot_tile<kDotRows, kOutputs, T>(m, row, output);
  if constexpr (kDotRows > 3)
    for (; row + 3 <= m.rows; row += 3) dot_tile<3, kOutputs, T>(m, row, output);
  for (; row < m.rows; ++row) dot_tile<1, kOutputs, T>(m, row, output);
}

template <class T>
static void gemm_few_rows_of(const GemmFewRows& m, int64_t left, int64_t right) {
  int64_t output = left;
  for (; output + kDotOutputs <= right; output += kDotOutputs) dot_rows<kDotOutputs, T>(m, output);
  for (; output < right; ++output) dot_rows<1, T>(m, output);
}

void gemm_few_rows(const GemmFewRows& m, int64_t left, int64_t right) {
  m.weight_bf16 ? gemm_few_rows_of<bfloat16>(m, left, right) : gemm_few_rows_of<float>(m, left, right);
}
