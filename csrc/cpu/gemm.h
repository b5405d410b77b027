// A panel of B, kDepth x kPanel, is packed into the first-level cache and multiplied by every row of the task. C
// accumulates the sums of kDepth terms in order, so that an element does not depend on the division into columns and
// threads.

constexpr int64_t kEdgeRows = 48;  // rows of the buffer that replaces C where its columns end inside a vector

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
  // What to prefetch. A packed weight's next panel follows this one. A panel that was packed here has no next one yet.
  // Its first product may find C outside the cache and prefetches it (null), unless the bias was just written there.
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

// For few rows each weight is used only a few times, so packing would not pay. Each output is a dot product of
// contiguous rows; kDotOutputs rows of W stay in the first-level cache while all rows of A use them.

constexpr int kDotRows = kLanes == 16 ? 6 : kLanes == 8 ? 2 : 3;  // times kDotOutputs sums fill the registers
constexpr int kDotOutputs = 4;

// How a dot product reads kTerms elements of each row and accumulates their products.
template <class Weight>
struct WidenedTerms {
  using A = float;
  using W = Weight;
  static constexpr int kTerms = kLanes;
  template <class T>
  FASTENC_INLINE Vec take(const T* p, int n) {
    return load_n(p, n);
  }
  FASTENC_INLINE Vec add_products(Vec sum, Vec a, Vec w) { return sum + a * w; }
};

#if FASTENC_VECTOR_BYTES == 64 || FASTENC_NEON_BF16
// The same with the processor's instruction for pairs of bfloat16.
struct Bfloat16Terms {
  using A = bfloat16;
  using W = bfloat16;
  static constexpr int kTerms = 2 * kLanes;
#if FASTENC_NEON_BF16
  FASTENC_INLINE bfloat16x8_t take(const bfloat16* p, int n) {
    bfloat16 terms[kTerms] = {};
    if (n < kTerms) __builtin_memcpy(terms, p, n * sizeof *p);
    return vld1q_bf16((const bfloat16_t*)(n == kTerms ? p : terms));
  }
  FASTENC_INLINE Vec add_products(Vec sum, bfloat16x8_t a, bfloat16x8_t w) {
    return (Vec)vbfdotq_f32((float32x4_t)sum, a, w);
  }
#else
  FASTENC_INLINE __m512i take(const bfloat16* p, int n) {
    return n == kTerms ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1u), p);
  }
  FASTENC_INLINE Vec add_products(Vec sum, __m512i a, __m512i w) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)w);
  }
#endif
};
#endif

// Also prefetches rows [first_ahead, last_ahead) of W: they lie too far apart for the processor to do it.
template <class Terms, int kRows, int kOutputs>
static void dot_tile(
    const GemmFewRows& m, int64_t row, int64_t output, int64_t first_ahead, int64_t last_ahead) {
  using A = typename Terms::A;
  using W = typename Terms::W;
  constexpr int kSums = (kRows * kOutputs + kLanes - 1) / kLanes * kLanes;
  const A* a = (const A*)m.a + row * m.a_row;
  const W* weights[kOutputs];
  for (int o = 0; o < kOutputs; ++o) weights[o] = (const W*)m.weight.rows[output + o];
  Vec sums[kSums];
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) sums[i] = Vec{};
  auto step = [&](int64_t k, int n) __attribute__((always_inline)) {
    decltype(Terms::take(weights[0], n)) w[kOutputs];
#pragma GCC unroll 4
    for (int o = 0; o < kOutputs; ++o) w[o] = Terms::take(weights[o] + k, n);
    for (int64_t o = first_ahead; o < last_ahead; ++o) __builtin_prefetch((const W*)m.weight.rows[o] + k);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto x = Terms::take(a + r * m.a_row + k, n);
#pragma GCC unroll 4
      for (int o = 0; o < kOutputs; ++o) sums[r * kOutputs + o] = Terms::add_products(sums[r * kOutputs + o], x, w[o]);
    }
  };
  int64_t k = 0;
  for (; k + Terms::kTerms <= m.weight.depth; k += Terms::kTerms) step(k, Terms::kTerms);
  if (k < m.weight.depth) step(k, (int)(m.weight.depth - k));
  alignas(64) float totals[kSums];
#pragma GCC unroll 8
  for (int i = 0; i < kSums; i += kLanes) store(totals + i, fold_rows<add>(sums + i));
  typedef float Outputs __attribute__((vector_size(kOutputs * sizeof(float))));
  Outputs bias{}, total;
  if (m.bias) __builtin_memcpy(&bias, m.bias + output, sizeof bias);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    __builtin_memcpy(&total, totals + r * kOutputs, sizeof total);
    total += bias;
    __builtin_memcpy(m.c + (row + r) * m.weight.count + output, &total, sizeof total);
  }
}

template <class Terms, int kOutputs, int kRows = kDotRows>
FASTENC_INLINE void dot_tile_of(
    int64_t rows, const GemmFewRows& m, int64_t row, int64_t output, int64_t first_ahead, int64_t last_ahead) {
  if (rows == kRows)
    dot_tile<Terms, kRows, kOutputs>(m, row, output, first_ahead, last_ahead);
  else if constexpr (kRows > 1)
    dot_tile_of<Terms, kOutputs, kRows - 1>(rows, m, row, output, first_ahead, last_ahead);
}

// The tiles divide the rows evenly: 20 rows are 4 x 5, not 3 x 6 and 2. Each tile also prefetches its share of W's rows
// for the next outputs.
template <class Terms, int kOutputs>
static void dot_rows(const GemmFewRows& m, int64_t output) {
  const int64_t tiles = (m.rows + kDotRows - 1) / kDotRows, next = output + kOutputs;
  const int64_t ahead = m.weight.count - next < kOutputs ? m.weight.count - next : kOutputs;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = m.rows * tile / tiles, last = m.rows * (tile + 1) / tiles;
    dot_tile_of<Terms, kOutputs>(
        last - first, m, first, output, next + ahead * tile / tiles, next + ahead * (tile + 1) / tiles);
  }
}

template <class Terms>
static void gemm_few_rows_of(const GemmFewRows& m, int64_t left, int64_t right) {
  int64_t output = left;
  for (; output + kDotOutputs <= right; output += kDotOutputs) dot_rows<Terms, kDotOutputs>(m, output);
  for (; output < right; ++output) dot_rows<Terms, 1>(m, output);
}

void gemm_few_rows(const GemmFewRows& m, int64_t left, int64_t right) {
#if FASTENC_VECTOR_BYTES == 64 || FASTENC_NEON_BF16
  if (m.a_bf16) return gemm_few_rows_of<Bfloat16Terms>(m, left, right);
#endif
  m.weight.bf16 ? gemm_few_rows_of<WidenedTerms<bfloat16>>(m, left, right)
                : gemm_few_rows_of<WidenedTerms<float>>(m, left, right);
}
