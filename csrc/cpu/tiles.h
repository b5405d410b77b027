// Register tiles of a product C (+)= A B with B's columns contiguous, for attention, gemm and encoder_layer.

constexpr int kTileRows = 6;
#if FASTENC_VECTOR_BYTES == 64 || FASTENC_ARM
constexpr int kTileVectors = 4;  // 24 of 32 registers accumulate
#else
constexpr int kTileVectors = 2;  // 12 of 16 registers
#endif
constexpr int64_t kPanel = kTileVectors * kLanes;   // the most columns of a tile
constexpr int64_t kDepth = 128;                    // rows of B in a pass: their panel stays in the first-level cache
constexpr int kTileUnroll = FASTENC_VECTOR_BYTES == 32 ? 2 : 1;  // measured with AVX2 only: 1 to 2 % faster than 1 or 4

// C (count x kRows rows, kVectors vectors) = or += A B. Element (row, k) of A is at a[row * lda + k], or transposed at
// a[k * lda + row]. The first tiles prefetch `ahead`, the panel that the next product reads: without cache misses a
// tile takes nine tenths of the time. If `ahead` is null, C may not be in the cache and is prefetched instead. Given a
// bias, C = bias + A B.
template <int kRows, int kVectors, bool kTransposed>
static void multiply_tiles(
    int64_t count, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc,
    bool add, const float* ahead, const float* bias) {
  for (; count; --count, a += kRows * (kTransposed ? 1 : lda), c += kRows * ldc) {
    Vec sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        if (!ahead && depth >= kDepth) __builtin_prefetch(c + r * ldc + v * kLanes, 1);
        sums[r][v] = Vec{};
      }
    const float* fetched = ahead ? ahead : b;
#pragma GCC unroll kTileUnroll
    for (int64_t k = 0; k < depth; ++k) {
      __builtin_prefetch(fetched + k * kPanel, 0, 2);
      Vec b_k[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) b_k[v] = load(b + k * ldb + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec a_k = splat(kTransposed ? a[k * lda + r] : a[r * lda + k]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(a_k, b_k[v], sums[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* target = c + r * ldc + v * kLanes;
        const float* start = bias ? bias + v * kLanes : target;
        store(target, add || bias ? load(start) + sums[r][v] : sums[r][v]);
      }
    if (ahead) ahead += kLanes;
  }
}

using Tiles = void (*)(
    int64_t, const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t, bool, const float*,
    const float*);

template <int kVectors, bool kTransposed>
FASTENC_INLINE Tiles tiles_of_rows(int64_t rows) {
  static_assert(kTileRows == 6);
  constexpr Tiles tiles[] = {
      multiply_tiles<1, kVectors, kTransposed>, multiply_tiles<2, kVectors, kTransposed>,
      multiply_tiles<3, kVectors, kTransposed>, multiply_tiles<4, kVectors, kTransposed>,
      multiply_tiles<5, kVectors, kTransposed>, multiply_tiles<6, kVectors, kTransposed>};
  return tiles[rows - 1];
}

template <bool kTransposed>
FASTENC_INLINE Tiles tiles_of(int64_t rows, int64_t vectors) {
  if (vectors == 1) return tiles_of_rows<1, kTransposed>(rows);
  if (kTileVectors == 2 || vectors == 2) return tiles_of_rows<2, kTransposed>(rows);
  if (vectors == 3) return tiles_of_rows<kTileVectors - 1, kTransposed>(rows);
  return tiles_of_rows<kTileVectors, kTransposed>(rows);
}

// Calls run(count, tile_rows, first) for tiles of at most `most` rows that share the rows evenly: 20 rows are 4 x 5, not
// 3 x 6 and a nearly empty one. Some may have one row more than the others.
template <class Run>
FASTENC_INLINE void share_rows(int64_t rows, Run run, int64_t most = kTileRows) {
  const int64_t tiles = (rows + most - 1) / most, fewer = rows / tiles, higher = rows % tiles;
  if (higher) run(higher, fewer + 1, 0);
  run(tiles - higher, fewer, higher * (fewer + 1));
}

// C (rows x columns) = or += A B for at most kPanel columns, a multiple of kLanes.
template <bool kTransposed = false>
static void multiply_panel(
    const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows, int64_t columns,
    int64_t depth, bool add, const float* ahead = nullptr, const float* bias = nullptr) {
  share_rows(rows, [&](int64_t count, int64_t tile_rows, int64_t first) {
    tiles_of<kTransposed>(tile_rows, columns / kLanes)(
        count, a + first * (kTransposed ? 1 : lda), lda, b, ldb, depth, c + first * ldc, ldc, add, ahead, bias);
    if (ahead) ahead += count * kLanes;
  });
}

FASTENC_INLINE int64_t panel_width(int64_t columns_left) { return columns_left < kPanel ? columns_left : kPanel; }

// Element (row, column) of a packed weight; the next rows follow kPanel apart.
FASTENC_INLINE const float* panel_at(const float* packed, int64_t depth, int64_t row, int64_t column) {
  return packed + (column / kPanel * depth + row) * kPanel + column % kPanel;
}

// Every row of C becomes the bias, or 0 without one.
static inline void fill_with_bias(const float* bias, int64_t columns, float* c, int64_t ldc, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    if (bias)
      __builtin_memcpy(c + row * ldc, bias, columns * sizeof(float));
    else
      __builtin_memset(c + row * ldc, 0, columns * sizeof(float));
  }
}
