// Products of 8 bits by AVX2 alone. Rows and weights are widened to 16 bits. vpmaddwd multiplies pairs of them and adds the
// two products, so the integers are those of VNNI. vpmaddubsw takes bytes, but it would saturate.

// Rows that are widened at a time, at most 36 KB. One load repeats 4 terms of a widened row.
constexpr int64_t kWideRows = 48;

FASTENC_INLINE __m256i widened_codes(const char* codes) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes));
}

static void widen_codes(const uint8_t* codes, int64_t count, uint16_t* wide) {
  for (int64_t k = 0; k < count; k += 16)
    _mm256_storeu_si256((__m256i*)(wide + k), _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(codes + k))));
}

// Adds 4 terms of a row times those of 8 columns: `low` has two sums of each of columns 0 to 3, `high` of columns 4 to 7.
// 12 sums, the weights and two products fill the registers. This is one statement, because g++ would otherwise compute the
// products of other rows first and spill sums.
FASTENC_INLINE void add_int8_pairs(__m256i& low, __m256i& high, const uint16_t* a, __m256i b_low, __m256i b_high) {
  __m256i terms, product;
  asm("vpbroadcastq %[a], %[terms]\n\t"
      "vpmaddwd %[b_low], %[terms], %[product]\n\t"
      "vpmaddwd %[b_high], %[terms], %[terms]\n\t"
      "vpaddd %[product], %[low], %[low]\n\t"
      "vpaddd %[terms], %[high], %[high]"
      : [terms] "=&x"(terms), [product] "=&x"(product), [low] "+x"(low), [high] "+x"(high)
      : [a] "m"(*(const int64_t*)a), [b_low] "x"(b_low), [b_high] "x"(b_high));
}

// C (count x kRows rows, kVectors vectors). `ahead` is the panel that a next product reads. Each tile fetches a part of it;
// the result is where the rest begins.
template <int kRows, int kVectors>
static const char* int8_pair_tiles(
    int64_t count, const uint16_t* a, int64_t lda, const float* ranges, int64_t groups, const Int8Panel& panel, float* c,
    int64_t ldc, bool add, const char* ahead) {
  for (; count; --count, a += kRows * lda, ranges += 2 * kRows * groups, c += kRows * ldc)
    for (int v = 0; v < kVectors; ++v) {
      __m256i low[kRows], high[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) low[r] = high[r] = __m256i{};
      for (int64_t unit = 0; unit < panel.depth; unit += kInt8Unit, ahead += 128) {
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + 64, 0, 2);
        const char* b = panel.codes + unit * kPanel + v * kInt8Tile;
#pragma GCC unroll 2
        for (int64_t k = 0; k < kInt8Unit; k += 4, b += kInt8TileRow) {
          const __m256i b_low = widened_codes(b), b_high = widened_codes(b + 16);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) add_int8_pairs(low[r], high[r], a + r * lda + unit + k, b_low, b_high);
        }
      }
      const Vec scales = load(panel.scales + v * kLanes), of_low = load(panel.of_low + v * kLanes);
      const Vec bias = panel.bias ? load(panel.bias + v * kLanes) : Vec{};
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const VecI sums = (VecI)_mm256_permute4x64_epi64(_mm256_hadd_epi32(low[r], high[r]), 0b11011000);
        float* target = c + r * ldc + v * kLanes;
        store(target, add_group(add ? load(target) : bias, sums, ranges + 2 * r * groups, scales, of_low));
      }
    }
  return ahead;
}

using Int8PairTiles = const char* (*)(
    int64_t, const uint16_t*, int64_t, const float*, int64_t, const Int8Panel&, float*, int64_t, bool, const char*);

template <int kVectors>
FASTENC_INLINE Int8PairTiles int8_pair_tiles_of(int64_t rows) {
  static_assert(kTileRows == 6 && kLanes == 8);
  constexpr Int8PairTiles tiles[] = {int8_pair_tiles<1, kVectors>, int8_pair_tiles<2, kVectors>,
                                     int8_pair_tiles<3, kVectors>, int8_pair_tiles<4, kVectors>,
                                     int8_pair_tiles<5, kVectors>, int8_pair_tiles<6, kVectors>};
  return tiles[rows - 1];
}

static void int8_multiply_by_pairs(const Int8Product& m) {
  static_assert(kPanel == 2 * kLanes);
  const Int8Groups groups(m.w.depth);
  alignas(64) uint16_t wide[kWideRows * kInt8LargestGroup];
  for (int64_t row = 0; row < m.rows; row += kWideRows) {
    const int64_t rows = m.rows - row < kWideRows ? m.rows - row : kWideRows;
    for (int64_t g = 0; g < m.a.groups.count; ++g) {
      const uint8_t* codes = m.a.q + row * m.a.stride + g * groups.size;
      for (int64_t r = 0; r < rows; ++r) widen_codes(codes + r * m.a.stride, groups.size, wide + r * groups.size);
      const float* ranges = m.a.ranges + 2 * (row * m.a.groups.count + g);
      for (int64_t j = 0; j < m.columns; j += kPanel) {
        const Int8Panel panel = int8_panel(m, groups, g, j);
        const char* ahead = j + kPanel < m.columns ? int8_panel(m, groups, g, j + kPanel).codes : m.next;
        const bool half = m.columns - j < kPanel;
        float* c = m.c + row * m.c_stride + j;
        share_rows(rows, [&](int64_t count, int64_t tile_rows, int64_t first) {
          ahead = (half ? int8_pair_tiles_of<1>(tile_rows) : int8_pair_tiles_of<2>(tile_rows))(
              count, wide + first * groups.size, groups.size, ranges + 2 * first * m.a.groups.count, m.a.groups.count,
              panel, c + first * m.c_stride, m.c_stride, m.add || g, ahead);
        });
      }
    }
  }
}
