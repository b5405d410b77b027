// Products of bfloat16 with packed weights (../packed_weights.h): packing of both operands, and the products by
// AVX512-BF16. A sum begins with the bias and adds the pairs of terms in order, so that it does not depend on the division
// into rows, columns and passes over the depth. Included for AVX-512 only.

constexpr int64_t kPanelTerms = 2 * kLanes;  // terms of a row that are packed at a time
constexpr int kPairTileRows = 12;            // rows of a tile of one or two vectors

// The pairs of the first `left` terms, at most kPanelTerms, of 16 rows of bfloat16: pair i of row r becomes
// packed[i * stride + r]. row(r) is null for a row of 0. Terms past the last are 0.
template <class Row>
FASTENC_INLINE void pack_pairs(int64_t left, float* packed, int64_t stride, Row row) {
  const __mmask32 terms = left < kPanelTerms ? (1u << left) - 1u : ~0u;
  Vec pairs[kLanes];
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    const bfloat16* from = row(r);
    pairs[r] = from ? (Vec)_mm512_maskz_loadu_epi16(terms, from) : Vec{};
  }
  transpose(pairs);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(packed + i * stride, pairs[i]);
}

void pack_tile_group(const WeightRows& weight, int64_t group, float* packed) {
  float* panel = packed + group * kTileColumns * tile_pairs(weight.depth);
  for (int64_t k = 0; k < weight.depth; k += kPanelTerms)
    for (int64_t c = 0; c < kTileColumns; c += kLanes)
      pack_pairs(
          weight.depth - k, panel + k / 2 * kTileColumns + c, kTileColumns,
          [&](int64_t i) __attribute__((always_inline)) {
            const int64_t column = group * kTileColumns + c + i;
            return column < weight.count ? (const bfloat16*)weight.rows[column] + k : nullptr;
          });
}

// Rounds to nearest, ties to even. NaN stays NaN. A number below 2^-126 becomes 0; the products, too, take it as 0.
FASTENC_INLINE void store_pairs(char* target, Vec x) {
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
  __builtin_memcpy(target, &narrow, sizeof narrow);
}

// Rows of bfloat16 as the products read them: whole tiles of rows, whose contents past the last row do not matter, and of
// the depth, which is filled up with 0.
struct TileRows {
  char* data;
  int64_t stride;  // bytes
};

// Fills up the depth of a row that has `columns` of it.
FASTENC_INLINE void fill_up_row(const TileRows& to, int64_t row, int64_t columns) {
  __builtin_memset(to.data + row * to.stride + 2 * columns, 0, tile_row_bytes(columns) - 2 * columns);
}

// Floats times `factor`.
static void fill_tile_rows(
    const float* x, int64_t stride, int64_t rows, int64_t columns, const TileRows& to, float factor = 1.f) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int count = columns - c < kLanes ? (int)(columns - c) : kLanes;
      store_pairs(to.data + r * to.stride + 2 * c, load_n(x + r * stride + c, count) * factor);
    }
    fill_up_row(to, r, columns);
  }
}
static void fill_tile_rows(const bfloat16* x, int64_t stride, int64_t rows, int64_t columns, const TileRows& to) {
  for (int64_t r = 0; r < rows; ++r) {
    __builtin_memcpy(to.data + r * to.stride, x + r * stride, 2 * columns);
    fill_up_row(to, r, columns);
  }
}

// B in panels of `width` columns: of each pair of terms, the columns side by side.
struct TilePanels {
  const char* data;
  int64_t width, bytes;  // bytes of a panel
  int64_t step() const { return 4 * width; }
  const char* at(int64_t column) const { return data + column / width * bytes + column % width * 4; }
};

// A packed weight from its row `top` on.
FASTENC_INLINE TilePanels tile_panels(const float* packed, int64_t depth, int64_t top = 0) {
  return {(const char*)(packed + top / 2 * kTileColumns), kTileColumns, kTileColumns * tile_row_bytes(depth)};
}

// What C's sums begin with: rows `stride` floats apart, or one row for all (stride 0); `sums` null: 0.
struct FirstSums {
  const float* sums;
  int64_t stride;
};

// C (count x kRows rows, kVectors vectors) = start + A B of `pairs` pairs of terms. Each tile fetches a part of `ahead`,
// the panel that is read next.
template <int kRows, int kVectors>
static void pair_tiles(
    int64_t count, const char* a, int64_t lda, const char* b, int64_t step, int64_t pairs, FirstSums start, float* c,
    int64_t ldc, const char* ahead) {
  for (; count; --count, a += kRows * lda, c += kRows * ldc, ahead += 64) {
    __m512 sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = start.sums ? (__m512)load(start.sums + r * start.stride + v * kLanes) : __m512{};
    for (int64_t k = 0; k < pairs; ++k) {
      __builtin_prefetch(ahead + k * step, 0, 2);
      __m512bh b_k[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) b_k[v] = (__m512bh)_mm512_loadu_si512(b + k * step + 64 * v);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        int32_t pair;
        __builtin_memcpy(&pair, a + r * lda + 4 * k, 4);
        const auto a_k = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], a_k, b_k[v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(c + r * ldc + v * kLanes, (Vec)sums[r][v]);
    if (start.sums) start.sums += kRows * start.stride;
  }
}

using PairTiles =
    void (*)(int64_t, const char*, int64_t, const char*, int64_t, int64_t, FirstSums, float*, int64_t, const char*);

template <int kVectors>
FASTENC_INLINE PairTiles pair_tiles_of_rows(int64_t rows) {
  static_assert(kTileRows == 6 && kPairTileRows == 12);
  constexpr PairTiles tiles[] = {pair_tiles<1, kVectors>, pair_tiles<2, kVectors>, pair_tiles<3, kVectors>,
                                 pair_tiles<4, kVectors>, pair_tiles<5, kVectors>, pair_tiles<6, kVectors>};
  if (rows <= kTileRows) return tiles[rows - 1];
  constexpr int kFew = kVectors <= 2 ? kVectors : 1;  // tiles of more vectors have no more rows
  constexpr PairTiles more[] = {pair_tiles<7, kFew>,  pair_tiles<8, kFew>,  pair_tiles<9, kFew>,
                                pair_tiles<10, kFew>, pair_tiles<11, kFew>, pair_tiles<12, kFew>};
  return more[rows - kTileRows - 1];
}

FASTENC_INLINE PairTiles pair_tiles_of(int64_t rows, int64_t vectors) {
  static_assert(kTileVectors == 4);
  if (vectors == 1) return pair_tiles_of_rows<1>(rows);
  if (vectors == 2) return pair_tiles_of_rows<2>(rows);
  return vectors == 3 ? pair_tiles_of_rows<3>(rows) : pair_tiles_of_rows<4>(rows);
}

// C (rows x columns) = bias + or += A times B's columns [left, left + columns), left a multiple of 16, of `pairs` pairs of
// terms. The bias, or null for 0, is that of these columns.
static void multiply_pairs(
    const TileRows& a, const TilePanels& b, int64_t pairs, int64_t left, int64_t columns, const float* bias, bool add,
    float* c, int64_t ldc, int64_t rows) {
  if (!rows) return;
  alignas(64) float edge[kPairTileRows * kPanel], edge_bias[kPanel];  // instead of C and the bias past the last column
  for (int64_t j = 0, width; j < columns; j += width) {
    width = b.width - (left + j) % b.width;
    if (width > columns - j) width = columns - j;
    const int64_t vectors = (width + kLanes - 1) / kLanes;
    const bool whole = width % kLanes == 0;
    if (!whole && bias) __builtin_memcpy(edge_bias, bias + j, width * sizeof(float));
    const char* panel = b.at(left + j);
    const char* ahead = j + width < columns ? b.at(left + j + width) : panel;
    share_rows(
        rows,
        [&](int64_t count, int64_t tile_rows, int64_t first) {
          const auto tiles = pair_tiles_of(tile_rows, vectors);
          const char* a_rows = a.data + first * a.stride;
          float* target = c + first * ldc + j;
          if (whole) {
            const FirstSums start = add ? FirstSums{target, ldc} : FirstSums{bias ? bias + j : nullptr, 0};
            tiles(count, a_rows, a.stride, panel, b.step(), pairs, start, target, ldc, ahead);
            ahead += 64 * count;
            return;
          }
          for (; count; --count, a_rows += tile_rows * a.stride, target += tile_rows * ldc) {
            for (int64_t r = 0; add && r < tile_rows; ++r)
              __builtin_memcpy(edge + r * kPanel, target + r * ldc, width * sizeof(float));
            const FirstSums start = add ? FirstSums{edge, kPanel} : FirstSums{bias ? edge_bias : nullptr, 0};
            tiles(1, a_rows, a.stride, panel, b.step(), pairs, start, edge, kPanel, ahead);
            for (int64_t r = 0; r < tile_rows; ++r)
              __builtin_memcpy(target + r * ldc, edge + r * kPanel, width * sizeof(float));
          }
        },
        vectors <= 2 ? kPairTileRows : kTileRows);
  }
}
