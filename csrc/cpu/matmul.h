// A panel of B, kDepth x kPanel, is packed into the nearest cache and meets every row of the task; C collects the sums
// of each kDepth terms, in their order, so that an element does not depend on rows, columns or threads beside it.

constexpr int64_t kEdgeRows = 48;  // of the buffer in C's place where its columns end inside a vector

// panel[k][c] = B[first_k + k][left + c]; columns up to the next multiple of kLanes are 0.
static void pack_panel(const Matmul& m, int64_t first_k, int64_t depth, int64_t left, int64_t columns, float* panel) {
  const float* b = m.b + first_k * m.b_depth + left * m.b_column;
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

// C's rows [first, last) += or = A's times the panel, whose rows are ldb apart.
template <bool kTransposed>
static void multiply_by_panel(
    const Matmul& m, int64_t first_k, int64_t depth, const float* panel, int64_t ldb, int64_t first, int64_t last,
    int64_t left, int64_t columns, bool add) {
  // The next of packed panels lies behind this one. One that was packed here is followed by none that is ready, but
  // its first product may find C in memory.
  const float* ahead = m.panels ? panel + depth * ldb : first_k || m.bias ? panel : nullptr;
  const int64_t lda = kTransposed ? m.a_depth : m.a_row;
  const float* a = m.a + first * m.a_row + first_k * m.a_depth;
  float* c = m.c + first * m.columns + left;
  if (columns % kLanes == 0) {
    multiply_panel<kTransposed>(a, lda, panel, ldb, c, m.columns, last - first, columns, depth, add, ahead);
    return;
  }
  alignas(64) float edge[kEdgeRows * kPanel];
  const int64_t padded = (columns + kLanes - 1) / kLanes * kLanes;
  for (int64_t row = 0; row < last - first; row += kEdgeRows) {
    const int64_t left_over = last - first - row, rows = left_over < kEdgeRows ? left_over : kEdgeRows;
    for (int64_t r = 0; add && r < rows; ++r)
      __builtin_memcpy(edge + r * kPanel, c + (row + r) * m.columns, columns * sizeof(float));
    multiply_panel<kTransposed>(a + row * m.a_row, lda, panel, ldb, edge, kPanel, rows, padded, depth, add, ahead);
    for (int64_t r = 0; r < rows; ++r)
      __builtin_memcpy(c + (row + r) * m.columns, edge + r * kPanel, columns * sizeof(float));
  }
}

void matmul_block(const Matmul& m, int64_t first, int64_t last, int64_t left, int64_t right) {
  alignas(64) float packed[kDepth * kPanel];
  const float* panel = packed;
  const int64_t ldb = m.panels ? kMatmulColumns : kPanel;
  for (int64_t j = left; j < right; j += kPanel) {
    const int64_t columns = panel_width(right - j);
    if (m.bias) fill_with_bias(m.bias + j, columns, m.c + first * m.columns + j, m.columns, last - first);
    for (int64_t k = 0; k < m.depth; k += kDepth) {
      const int64_t depth = m.depth - k < kDepth ? m.depth - k : kDepth;
      const bool add = m.add || m.bias || k;
      if (m.panels)
        panel = panel_at(m.panels, m.depth, k, j);
      else
        pack_panel(m, k, depth, j, columns, packed);
      if (m.a_depth == 1)
        multiply_by_panel<false>(m, k, depth, panel, ldb, first, last, j, columns, add);
      else
        multiply_by_panel<true>(m, k, depth, panel, ldb, first, last, j, columns, add);
    }
  }
}
