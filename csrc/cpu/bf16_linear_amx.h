// Products of bfloat16 by AMX with packed weights; see ../packed_weights.h. A sum begins with the bias and adds 32 terms at
// a time, in order, so that it does not depend on the division into rows, columns and passes over the depth. Included for
// AVX-512 only.

constexpr int64_t kAmxTerms = kAmxBytes / 2;  // of bfloat16 in a tile's row

// The pairs of the first `left` terms, at most kAmxTerms, of 16 rows of bfloat16: pair i of row r becomes
// packed[i * stride + r]. row(r) is null for a row of 0. Terms past the last are 0.
template <class Row>
FASTENC_INLINE void pack_pairs(int64_t left, float* packed, int64_t stride, Row row) {
  const __mmask32 terms = left < kAmxTerms ? (1u << left) - 1u : ~0u;
  Vec pairs[kAmxRows];
#pragma GCC unroll 16
  for (int r = 0; r < kAmxRows; ++r) {
    const bfloat16* from = row(r);
    pairs[r] = from ? (Vec)_mm512_maskz_loadu_epi16(terms, from) : Vec{};
  }
  transpose(pairs);
#pragma GCC unroll 16
  for (int i = 0; i < kAmxRows; ++i) store(packed + i * stride, pairs[i]);
}

void pack_tile_group(const WeightRows& weight, int64_t group, float* packed) {
  float* panel = packed + group * kTileColumns * tile_pairs(weight.depth);
  for (int64_t k = 0; k < weight.depth; k += kAmxTerms)
    for (int64_t c = 0; c < kTileColumns; c += kAmxRows)
      pack_pairs(
          weight.depth - k, panel + k / 2 * kTileColumns + c, kTileColumns,
          [&](int64_t i) __attribute__((always_inline)) {
            const int64_t column = group * kTileColumns + c + i;
            return column < weight.count ? (const bfloat16*)weight.rows[column] + k : nullptr;
          });
}

// Rounds to nearest, ties to even. NaN stays NaN. A number below 2^-126 becomes 0; AMX, too, takes it as 0.
FASTENC_INLINE void store_pairs(char* target, Vec x) {
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
  __builtin_memcpy(target, &narrow, sizeof narrow);
}

// Rows of bfloat16 as tiles read them: whole tiles of rows, whose contents past the last row do not matter, and of the
// depth, which is filled up with 0.
struct TileRows {
  char* data;
  int64_t stride;  // bytes
};

// Fills up the depth of a row that has `columns` of it.
FASTENC_INLINE void fill_up_row(const TileRows& to, int64_t row, int64_t columns) {
  __builtin_memset(to.data + row * to.stride + 2 * columns, 0, tile_row_bytes(columns) - 2 * columns);
}

static void fill_tile_rows(const float* x, int64_t stride, int64_t rows, int64_t columns, const TileRows& to) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int count = columns - c < kLanes ? (int)(columns - c) : kLanes;
      store_pairs(to.data + r * to.stride + 2 * c, load_n(x + r * stride + c, count));
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

// C (rows x columns) = bias + or += A times B's columns [left, left + columns), left a multiple of 16, over `steps` tiles
// of the depth. The bias, or null for 0, is that of these columns.
static void multiply_tiles(
    const TileRows& a, const TilePanels& b, int64_t steps, int64_t left, int64_t columns, const float* bias, bool add,
    float* c, int64_t ldc, int64_t rows) {
  alignas(64) float edge[kAmxBlock * kAmxBlock];  // instead of C where it ends inside a tile
  for (int64_t j = 0, width; j < columns; j += width) {
    width = b.width - (left + j) % b.width;
    if (width > kAmxBlock) width = kAmxBlock;
    if (width > columns - j) width = columns - j;
    for (int64_t row = 0; row < rows; row += kAmxBlock) {
      const int64_t count = rows - row < kAmxBlock ? rows - row : kAmxBlock;
      const bool whole = count % kAmxRows == 0 && width % kAmxRows == 0;
      float* target = c + row * ldc + j;
      float* sums = whole ? target : edge;
      const int64_t stride = whole ? ldc : kAmxBlock;
      for (int64_t r = 0; !whole && (add || bias) && r < count; ++r)
        __builtin_memcpy(edge + r * kAmxBlock, add ? target + r * ldc : bias + j, width * sizeof(float));
      const float* start = add ? sums : !bias ? nullptr : whole ? bias + j : edge;
      amx_block_of(
          count, width, a.data + row * a.stride, a.stride, b.at(left + j), b.step(), steps, (const char*)start,
          start == sums ? 4 * stride : 0, (char*)sums, 4 * stride);
      for (int64_t r = 0; !whole && r < count; ++r)
        __builtin_memcpy(target + r * ldc, edge + r * kAmxBlock, width * sizeof(float));
    }
  }
}

// A packed weight from its row `top` on.
FASTENC_INLINE TilePanels tile_panels(const float* packed, int64_t depth, int64_t top = 0) {
  return {(const char*)(packed + top / 2 * kTileColumns), kTileColumns, kTileColumns * tile_row_bytes(depth)};
}

void fill_tile_rows(const GemmTiles& m, int64_t first, int64_t last, float* rows) {
  const TileRows to{(char*)rows, tile_row_stride(m.depth)};
  const int64_t start = first * m.a_row;
  m.a_bf16 ? fill_tile_rows((const bfloat16*)m.a + start, m.a_row, last - first, m.depth, to)
           : fill_tile_rows((const float*)m.a + start, m.a_row, last - first, m.depth, to);
}

void gemm_tiles(
    const GemmTiles& m, const float* rows, int64_t first, int64_t last, int64_t left, int64_t right) {
  const AmxTiles tiles;
  multiply_tiles(
      {(char*)rows, tile_row_stride(m.depth)}, tile_panels(m.packed, m.depth), tile_pairs(m.depth) / kAmxRows, left,
      right - left, m.bias ? m.bias + left : nullptr, false, m.c + first * m.columns + left, m.columns, last - first);
}
