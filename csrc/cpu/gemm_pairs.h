// Products of bfloat16 by AVX512-BF16 or AMX: of any number of rows with a packed weight, and of few rows with an unpacked
// one. The latter compute C^T = W A^T: A's rows lie side by side in the lanes, and each pair of terms of W multiplies all
// of them, so that W need not be packed and a sum has the bits of the former. Included for AVX-512 only.

void fill_tile_rows(const GemmTiles& m, int64_t first, int64_t last, float* rows) {
  const TileRows to{(char*)rows, tile_row_stride(m.depth)};
  const int64_t start = first * m.a_row;
  m.a_bf16 ? fill_tile_rows((const bfloat16*)m.a + start, m.a_row, last - first, m.depth, to)
           : fill_tile_rows((const float*)m.a + start, m.a_row, last - first, m.depth, to);
}

void gemm_tiles(
    const GemmTiles& m, const float* rows, int64_t first, int64_t last, int64_t left, int64_t right) {
  const TileRows a{(char*)rows, tile_row_stride(m.depth)};
  const TilePanels b = tile_panels(m.packed, m.depth);
  const float* bias = m.bias ? m.bias + left : nullptr;
  float* c = m.c + first * m.columns + left;
  if (has_bf16_tiles()) {
    const AmxTiles tiles;
    multiply_tiles(a, b, tile_pairs(m.depth) / kAmxRows, left, right - left, bias, false, c, m.columns, last - first);
  } else {
    multiply_pairs(a, b, (m.depth + 1) / 2, left, right - left, bias, false, c, m.columns, last - first);
  }
}

// packed[block of 16 rows][32 terms][pair][row]. Rows and terms beyond A's are 0.
void pack_pair_rows(const GemmFewRows& m, float* packed) {
  for (int64_t row = 0; row < m.rows; row += kLanes)
    for (int64_t k = 0; k < m.weight.depth; k += kPanelTerms, packed += kLanes * kLanes)
      pack_pairs(m.weight.depth - k, packed, kLanes, [&](int64_t r) __attribute__((always_inline)) {
        return row + r < m.rows ? (const bfloat16*)m.a + (row + r) * m.a_row + k : nullptr;
      });
}

FASTENC_INLINE __m256 add_pairs(__m256 sums, __m256bh a, __m256bh b) { return _mm256_dpbf16_ps(sums, a, b); }
FASTENC_INLINE __m512 add_pairs(__m512 sums, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sums, a, b); }

// The rows of kBlocks packed blocks, and of half a block if kHalf. Prefetches rows [first_ahead, last_ahead) of W.
template <int kOutputs, int kBlocks, bool kHalf>
static void pair_row_tile(
    const GemmFewRows& m, const float* packed, int64_t row, int64_t output, int64_t first_ahead, int64_t last_ahead) {
  constexpr int kFull = kBlocks ? kBlocks : 1, kHalves = kHalf ? kOutputs : 1;
  constexpr int64_t kWidth = kBlocks * kLanes + kHalf * kHalfLanes;
  const int64_t depth = m.weight.depth, block = tile_pairs(depth) * kLanes;
  const float* rows = packed + row / kLanes * block;
  const char* weights[kOutputs];
  __m512 sums[kOutputs][kFull];
  __m256 halves[kHalves];
#pragma GCC unroll 16
  for (int o = 0; o < kOutputs; ++o) {
    weights[o] = (const char*)m.weight.rows[output + o];
    const Vec bias = splat(m.bias ? m.bias[output + o] : 0.f);
#pragma GCC unroll 4
    for (int v = 0; v < kBlocks; ++v) sums[o][v] = (__m512)bias;
    if constexpr (kHalf) __builtin_memcpy(&halves[o], &bias, sizeof(HalfVec));
  }
  auto multiply = [&](int64_t pair, int bytes) __attribute__((always_inline)) {
    __m512bh x[kFull];
    __m256bh half{};
#pragma GCC unroll 4
    for (int v = 0; v < kBlocks; ++v) x[v] = (__m512bh)_mm512_loadu_si512(rows + v * block + pair * kLanes);
    if constexpr (kHalf) half = (__m256bh)_mm256_loadu_si256((const __m256i*)(rows + kBlocks * block + pair * kLanes));
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) {
      int32_t terms = 0;
      __builtin_memcpy(&terms, weights[o] + 4 * pair, bytes);
      const __m512i w = _mm512_set1_epi32(terms);
#pragma GCC unroll 4
      for (int v = 0; v < kBlocks; ++v) sums[o][v] = add_pairs(sums[o][v], x[v], (__m512bh)w);
      if constexpr (kHalf) halves[o] = add_pairs(halves[o], half, (__m256bh)_mm512_castsi512_si256(w));
    }
  };
  const int64_t pairs = depth / 2;
  int64_t k = 0;
  for (; k + kLanes <= pairs; k += kLanes) {  // a line of the cache
    for (int64_t o = first_ahead; o < last_ahead; ++o) __builtin_prefetch((const char*)m.weight.rows[o] + 4 * k, 0, 2);
#pragma GCC unroll 2
    for (int64_t i = 0; i < kLanes; ++i) multiply(k + i, 4);
  }
  for (; k < pairs; ++k) multiply(k, 4);
  if (depth % 2) multiply(pairs, 2);
  alignas(64) float totals[kOutputs][kMostTileRows];
#pragma GCC unroll 16
  for (int o = 0; o < kOutputs; ++o) {
#pragma GCC unroll 4
    for (int v = 0; v < kBlocks; ++v) store(totals[o] + v * kLanes, (Vec)sums[o][v]);
    if constexpr (kHalf) _mm256_store_ps(totals[o] + kBlocks * kLanes, halves[o]);
  }
  write_transposed<kOutputs>(totals, m, row, kWidth, output);
}

// Columns [left, right) in steps of kOutputs, as far as they go; returns the column after them.
template <int kOutputs, int kBlocks, bool kHalf>
static int64_t pair_row_tiles(const GemmFewRows& m, const float* packed, int64_t row, int64_t left, int64_t right) {
  int64_t output = left;
  for (; output + kOutputs <= right; output += kOutputs) {
    const int64_t next = output + kOutputs, end = next + kOutputs;
    pair_row_tile<kOutputs, kBlocks, kHalf>(m, packed, row, output, next, end < m.weight.count ? end : m.weight.count);
  }
  return output;
}

template <int kBlocks, bool kHalf>
static void pair_row_columns(const GemmFewRows& m, const float* packed, int64_t row, int64_t left, int64_t right) {
  // With few sums in a tile, each product would wait for the last.
  constexpr int kOutputs = kBlocks + kHalf <= 1 ? 16 : 8;
  const int64_t output = pair_row_tiles<kOutputs, kBlocks, kHalf>(m, packed, row, left, right);
  pair_row_tiles<1, kBlocks, kHalf>(m, packed, row, output, right);
}

// All rows of columns [left, right); packed by pack_pair_rows. Some rows of W stay in the first-level cache while all rows
// of A use them.
void gemm_pairs(const GemmFewRows& m, const float* packed, int64_t left, int64_t right) {
  if (has_bf16_tiles()) return gemm_amx(m, packed, left, right);
  static_assert(kRowVectors == 3);
  using Columns = void (*)(const GemmFewRows&, const float*, int64_t, int64_t, int64_t);
  constexpr Columns of_halves[] = {pair_row_columns<0, true>, pair_row_columns<1, false>, pair_row_columns<1, true>,
                                   pair_row_columns<2, false>, pair_row_columns<2, true>, pair_row_columns<3, false>};
  const int64_t blocks = (m.rows + kLanes - 1) / kLanes, tiles = (blocks + kRowVectors - 1) / kRowVectors;
  for (int64_t column = left; column < right; column += kLanes) {
    const int64_t last = column + kLanes < right ? column + kLanes : right;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = blocks * tile / tiles * kLanes, end = blocks * (tile + 1) / tiles * kLanes;
      const int64_t rows = (end < m.rows ? end : m.rows) - row;
      of_halves[(rows + kHalfLanes - 1) / kHalfLanes - 1](m, packed, row, column, last);
    }
  }
}
