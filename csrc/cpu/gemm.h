// A panel of B, kDepth x kPanel, lies in the first-level cache and is multiplied by every row of the task. C accumulates
// the sums of kDepth terms in order, so that an element does not depend on the division into columns and threads.

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

// C (rows x columns) = or += A's rows times the panel, or = bias + them. Element (row, k) of A is at a[row * lda + k], or
// transposed at a[k * lda + row].
template <bool kTransposed>
static void multiply_by_panel(
    const float* a, int64_t lda, const float* panel, float* c, int64_t ldc, int64_t rows, int64_t columns,
    int64_t depth, bool add, const float* ahead, const float* bias) {
  if (columns % kLanes == 0) {
    multiply_panel<kTransposed>(a, lda, panel, kPanel, c, ldc, rows, columns, depth, add, ahead, bias);
    return;
  }
  alignas(64) float edge[kEdgeRows * kPanel];
  const int64_t padded = (columns + kLanes - 1) / kLanes * kLanes;
  for (int64_t row = 0; row < rows; row += kEdgeRows) {
    const int64_t left_over = rows - row, count = left_over < kEdgeRows ? left_over : kEdgeRows;
    for (int64_t r = 0; (add || bias) && r < count; ++r)
      __builtin_memcpy(edge + r * kPanel, bias ? bias : c + (row + r) * ldc, columns * sizeof(float));
    multiply_panel<kTransposed>(
        a + row * (kTransposed ? 1 : lda), lda, panel, kPanel, edge, kPanel, count, padded, depth, add || bias, ahead);
    for (int64_t r = 0; r < count; ++r)
      __builtin_memcpy(c + (row + r) * ldc, edge + r * kPanel, columns * sizeof(float));
  }
}

// Panel of B from its row first_k on, `depth` rows: the packed weight's, or packed into `buffer`.
FASTENC_INLINE const float* panel_of_b(
    const Gemm& m, int64_t first_k, int64_t depth, int64_t left, int64_t columns, float* buffer) {
  if (m.packed_b) return panel_at(m.packed_b, m.depth, first_k, left);
  m.b_bf16 ? pack_panel<bfloat16>(m, first_k, depth, left, columns, buffer)
           : pack_panel<float>(m, first_k, depth, left, columns, buffer);
  return buffer;
}

// copied[row][k] = A[first + row][first_k + k].
static void copy_rows(const Gemm& m, int64_t first, int64_t rows, int64_t first_k, int64_t depth, float* copied) {
  const float* a = m.a + first * m.a_row + first_k * m.a_depth;
  if (m.a_depth == 1) {
    for (int64_t row = 0; row < rows; ++row)
      __builtin_memcpy(copied + row * kDepth, a + row * m.a_row, depth * sizeof(float));
    return;
  }
  for (int64_t k = 0; k < depth; k += kLanes)
    for (int64_t row = 0; row < rows; row += kLanes) {
      const int count = rows - row < kLanes ? (int)(rows - row) : kLanes;
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = k + i < depth ? load_n(a + (k + i) * m.a_depth + row, count) : Vec{};
      transpose(block);
      for (int i = 0; i < count; ++i) store(copied + (row + i) * kDepth + k, block[i]);
    }
}

// Many rows: kDepth of each are copied side by side, and all columns multiply them. In place, rows that lie far apart
// share sets of the caches, and each panel of B would read a page a row.
static void multiply_copied_rows(const Gemm& m, int64_t first, int64_t last, int64_t left, int64_t right) {
  alignas(64) float copied[kCopiedRows * kDepth], packed[kDepth * kPanel];
  for (int64_t row = first, rows; row < last; row += rows) {
    rows = last - row < kCopiedRows ? last - row : kCopiedRows;
    for (int64_t k = 0; k < m.depth; k += kDepth) {
      const int64_t depth = m.depth - k < kDepth ? m.depth - k : kDepth;
      copy_rows(m, row, rows, k, depth, copied);
      for (int64_t j = left; j < right; j += kPanel) {
        const int64_t columns = panel_width(right - j);
        const float* panel = panel_of_b(m, k, depth, j, columns, packed);
        // A packed weight's next panel is prefetched; one that is packed here does not exist yet.
        const bool has_next = m.packed_b && j + columns < right;
        multiply_by_panel<false>(
            copied, kDepth, panel, m.c + row * m.columns + j, m.columns, rows, columns, depth, m.add || k,
            has_next ? panel_at(m.packed_b, m.depth, k, j + columns) : nullptr, m.bias && !k ? m.bias + j : nullptr);
      }
    }
  }
}

// Few rows for each panel: a packed weight's panels are read one after the other, and each prefetches the next.
static void multiply_rows_in_place(const Gemm& m, int64_t first, int64_t last, int64_t left, int64_t right) {
  alignas(64) float packed[kDepth * kPanel];
  const float* a = m.a + first * m.a_row;
  for (int64_t j = left; j < right; j += kPanel) {
    const int64_t columns = panel_width(right - j);
    float* c = m.c + first * m.columns + j;
    if (m.bias) fill_with_bias(m.bias + j, columns, c, m.columns, last - first);
    for (int64_t k = 0; k < m.depth; k += kDepth) {
      const int64_t depth = m.depth - k < kDepth ? m.depth - k : kDepth;
      const float* panel = panel_of_b(m, k, depth, j, columns, packed);
      // What to prefetch. A packed weight's next panel follows this one. A panel that was packed here has no next one
      // yet. Its first product may find C outside the cache and prefetches it (null), unless the bias was just written
      // there.
      const float* ahead = m.packed_b ? panel + depth * kPanel : k || m.bias ? panel : nullptr;
      const bool add = m.add || m.bias || k;
      if (m.a_depth == 1)
        multiply_by_panel<false>(
            a + k, m.a_row, panel, c, m.columns, last - first, columns, depth, add, ahead, nullptr);
      else
        multiply_by_panel<true>(
            a + k * m.a_depth, m.a_depth, panel, c, m.columns, last - first, columns, depth, add, ahead, nullptr);
    }
  }
}

void gemm_block(const Gemm& m, int64_t first, int64_t last, int64_t left, int64_t right) {
  copies_rows(FASTENC_VECTOR_BYTES, m.rows) ? multiply_copied_rows(m, first, last, left, right)
                                            : multiply_rows_in_place(m, first, last, left, right);
}

// For few rows each weight is used only a few times, so packing it would not pay. It is float32, or bfloat16 without the
// processor's products of pairs. A's rows lie side by side in the lanes, and each element of W multiplies all of them, so
// that W need not be transposed and an element's sum has the order of gemm_block.

constexpr int kHalfLanes = kLanes / 2;
typedef float HalfVec __attribute__((vector_size(FASTENC_VECTOR_BYTES / 2)));
FASTENC_INLINE HalfVec multiply_add(HalfVec a, HalfVec b, HalfVec c) {
#if FASTENC_VECTOR_BYTES == 64
  return (HalfVec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif FASTENC_VECTOR_BYTES == 32
  return (HalfVec)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif FASTENC_ARM
  return (HalfVec)vfma_f32((float32x2_t)c, (float32x2_t)a, (float32x2_t)b);
#else
  return a * b + c;
#endif
}
constexpr int kRowVectors = 3;                                       // the most vectors of rows of a tile
constexpr int kRowOutputs = kTileVectors == 4 ? 8 : 4;              // times kRowVectors sums fill the registers
constexpr int kNarrowOutputs = 8;                                   // of a tile that has only one vector, or less than two
constexpr bool kPairsHalves = FASTENC_VECTOR_BYTES == 32;           // a half vector takes as long as a whole one
constexpr int64_t kMostTileRows = kRowVectors * kLanes;
constexpr int64_t kLine = 16;  // floats of a line of the cache

// Calls run(first, width) for tiles that share the rows evenly; the width is a multiple of kHalfLanes.
template <class Run>
FASTENC_INLINE void share_lanes(int64_t rows, Run run) {
  const int64_t halves = (rows + kHalfLanes - 1) / kHalfLanes, most = 2 * kRowVectors;
  const int64_t tiles = (halves + most - 1) / most;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = halves * tile / tiles, last = halves * (tile + 1) / tiles;
    run(first * kHalfLanes, (last - first) * kHalfLanes);
  }
}

// packed: tile after tile; in a tile, element (k, row) is at k * width + row. Rows past the last are 0.
void pack_few_rows(const GemmFewRows& m, float* packed) {
  const float* a = (const float*)m.a;
  const int64_t depth = m.weight.depth;
  share_lanes(m.rows, [&](int64_t first, int64_t width) {
    float* tile = packed + first * depth;
    for (int64_t r = 0; r < width; r += kHalfLanes)
      for (int64_t k = 0; k < depth; k += kLanes) {
        const int count = depth - k < kLanes ? (int)(depth - k) : kLanes;
        Vec block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          const int64_t row = first + r + i;
          block[i] = i < kHalfLanes && row < m.rows ? load_n(a + row * m.a_row + k, count) : Vec{};
        }
        transpose(block);
        for (int i = 0; i < count; ++i) __builtin_memcpy(tile + (k + i) * width + r, &block[i], sizeof(HalfVec));
      }
  });
}

// Sums of half vectors of rows: one for each output, or paired, those of two outputs in a vector.
template <int kOutputs, bool kPaired>
struct HalfSums {
  HalfVec sums[kOutputs] = {};
  FASTENC_INLINE HalfVec take(const float* a) {
    HalfVec half;
    __builtin_memcpy(&half, a, sizeof half);
    return half;
  }
  __attribute__((always_inline)) void add_product(int output, HalfVec a, const float* const* weights, int64_t k) {
    sums[output] = multiply_add(a, weights[output][k] - HalfVec{}, sums[output]);
  }
  __attribute__((always_inline)) HalfVec of(int output) const { return sums[output]; }
};

#if FASTENC_VECTOR_BYTES == 32
template <int kOutputs>
struct HalfSums<kOutputs, true> {
  Vec sums[kOutputs / 2] = {};
  FASTENC_INLINE Vec take(const float* a) { return (Vec)_mm256_broadcast_ps((const __m128*)a); }
  // A pair is multiplied when its second output comes. The blend's mask is part of the instruction, which then runs
  // beside multiply-adds; with a mask in a register it would take the place of one.
  __attribute__((always_inline)) void add_product(int output, Vec a, const float* const* weights, int64_t k) {
    if (output % 2 == 0) return;
    const __m256 first = (__m256)splat(weights[output - 1][k]), second = (__m256)splat(weights[output][k]);
    sums[output / 2] = multiply_add(a, (Vec)_mm256_blend_ps(first, second, 0xf0), sums[output / 2]);
  }
  __attribute__((always_inline)) HalfVec of(int output) const {
    HalfVec halves[2];
    __builtin_memcpy(halves, &sums[output / 2], sizeof halves);
    return halves[output % 2];
  }
};
#endif

// The sums of `width` rows from `row` on, and kOutputs outputs from `output` on; totals has a row for each output.
template <int kOutputs>
static void write_transposed(
    const float (*totals)[kMostTileRows], const GemmFewRows& m, int64_t row, int64_t width, int64_t output) {
  const int64_t rows = m.rows - row < width ? m.rows - row : width, columns = m.weight.count;
  float* c = m.c + row * columns + output;
  for (int64_t r = 0; r < rows; r += kLanes) {
    // A transposition of kOutputs vectors: in round after round vector i and i + kOutputs / 2 are interleaved.
    Vec from[kOutputs], to[kOutputs];
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) from[o] = load(totals[o] + r);
#pragma GCC unroll 4
    for (int round = 1; round < kOutputs; round *= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < kOutputs / 2; ++i) {
        to[2 * i] = interleave_low(from[i], from[i + kOutputs / 2]);
        to[2 * i + 1] = interleave_high(from[i], from[i + kOutputs / 2]);
      }
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) from[o] = to[o];
    }
    alignas(64) float turned[kOutputs * kLanes];
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) store(turned + o * kLanes, from[o]);
    const int64_t count = rows - r < kLanes ? rows - r : kLanes;
    for (int64_t i = 0; i < count; ++i)
      __builtin_memcpy(c + (r + i) * columns, turned + i * kOutputs, kOutputs * sizeof(float));
  }
}

// The rows of one tile: kVectors vectors, and a half if kHalf. Prefetches rows [first_ahead, last_ahead) of W.
template <class T, int kOutputs, int kVectors, bool kHalf>
static void row_tile(
    const GemmFewRows& m, const float* a, int64_t row, int64_t output, int64_t first_ahead, int64_t last_ahead) {
  constexpr int64_t kWidth = kVectors * kLanes + kHalf * kHalfLanes;
  constexpr int kFull = kVectors ? kVectors : 1;
  alignas(64) float totals[kOutputs][kMostTileRows];
  float widened[sizeof(T) == sizeof(float) ? 1 : kOutputs * kDepth];
  for (int64_t start = 0; start < m.weight.depth; start += kDepth) {
    const int64_t left = m.weight.depth - start, depth = left < kDepth ? left : kDepth;
    const float* weights[kOutputs];
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      const T* row_of_w = (const T*)m.weight.rows[output + o] + start;
      if constexpr (sizeof(T) == sizeof(float)) {
        weights[o] = row_of_w;
      } else {
        for (int64_t k = 0; k < depth; k += kLanes) {
          const int count = depth - k < kLanes ? (int)(depth - k) : kLanes;
          store_n(widened + o * kDepth + k, load_n(row_of_w + k, count), count);
        }
        weights[o] = widened + o * kDepth;
      }
    }
    Vec sums[kOutputs][kFull];
    HalfSums<kHalf ? kOutputs : 1, kHalf && kPairsHalves && kOutputs % 2 == 0> halves;
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[o][v] = Vec{};
    const float* a_k = a + start * kWidth;
    auto multiply = [&](int64_t k) __attribute__((always_inline)) {
      Vec x[kFull];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[v] = load(a_k + v * kLanes);
      decltype(halves.take(a_k)) half{};
      if constexpr (kHalf) half = halves.take(a_k + kVectors * kLanes);
#pragma GCC unroll 8
      for (int o = 0; o < kOutputs; ++o) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[o][v] = multiply_add(x[v], splat(weights[o][k]), sums[o][v]);
        if constexpr (kHalf) halves.add_product(o, half, weights, k);
      }
      a_k += kWidth;
    };
    int64_t k = 0;
    for (; k + kLine <= depth; k += kLine) {
      for (int64_t o = first_ahead; o < last_ahead; ++o)
        __builtin_prefetch((const T*)m.weight.rows[o] + start + k, 0, 2);  // rows of W may share sets of the first level
#pragma GCC unroll 4
      for (int64_t i = 0; i < kLine; ++i) multiply(k + i);
    }
    for (; k < depth; ++k) multiply(k);
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      const bool first = !start && !m.bias;
      const float bias = m.bias ? m.bias[output + o] : 0.f;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* total = totals[o] + v * kLanes;
        store(total, first ? sums[o][v] : (start ? load(total) : splat(bias)) + sums[o][v]);
      }
      if constexpr (kHalf) {
        float* total = totals[o] + kVectors * kLanes;
        HalfVec before = bias - HalfVec{};
        if (start) __builtin_memcpy(&before, total, sizeof before);
        before = first ? halves.of(o) : before + halves.of(o);
        __builtin_memcpy(total, &before, sizeof before);
      }
    }
  }
  write_transposed<kOutputs>(totals, m, row, kWidth, output);
}

using RowTile = void (*)(const GemmFewRows&, const float*, int64_t, int64_t, int64_t, int64_t);

template <class T, int kOutputs>
FASTENC_INLINE RowTile row_tile_of(int64_t width) {
  static_assert(kRowVectors == 3);
  constexpr RowTile narrow[] = {
      row_tile<T, kOutputs, 0, true>, row_tile<T, kOutputs, 1, false>, row_tile<T, kOutputs, 1, true>};
  const int64_t halves = width / kHalfLanes;
  if (halves <= 3 || kOutputs > kRowOutputs) return narrow[halves - 1];
  constexpr int kSome = kOutputs > kRowOutputs ? 1 : kOutputs;  // wider tiles of more outputs are never asked for
  constexpr RowTile wide[] = {row_tile<T, kSome, 2, false>, row_tile<T, kSome, 2, true>, row_tile<T, kSome, 3, false>};
  return wide[halves - 4];
}

// Each tile also prefetches its share of W's rows for the next outputs.
template <class T, int kOutputs>
static void multiply_rows(const GemmFewRows& m, const float* packed, int64_t output, int64_t right) {
  const int64_t next = output + kOutputs, room = right - next, most = room < kOutputs ? room : kOutputs;
  const int64_t ahead = most < 0 ? 0 : most, padded = (m.rows + kHalfLanes - 1) / kHalfLanes * kHalfLanes;
  share_lanes(m.rows, [&](int64_t first, int64_t width) {
    row_tile_of<T, kOutputs>(width)(
        m, packed + first * m.weight.depth, first, output, next + ahead * first / padded,
        next + ahead * (first + width) / padded);
  });
}

template <class T>
static void gemm_few_rows_in_lanes(const GemmFewRows& m, const float* packed, int64_t left, int64_t right) {
  int64_t output = left;
  // With few sums in a tile, each multiply-add would wait for the last.
  if (m.rows <= kLanes + kHalfLanes)
    for (; output + kNarrowOutputs <= right; output += kNarrowOutputs)
      multiply_rows<T, kNarrowOutputs>(m, packed, output, right);
  for (; output + kRowOutputs <= right; output += kRowOutputs) multiply_rows<T, kRowOutputs>(m, packed, output, right);
  for (; output < right; ++output) multiply_rows<T, 1>(m, packed, output, right);
}

void gemm_few_rows(const GemmFewRows& m, const float* packed, int64_t left, int64_t right) {
  m.weight.bf16 ? gemm_few_rows_in_lanes<bfloat16>(m, packed, left, right)
                : gemm_few_rows_in_lanes<float>(m, packed, left, right);
}
