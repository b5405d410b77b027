// Products of 8 bits by VNNI, which multiplies 4 terms of each lane and adds them to its sum.

#if FASTENC_VECTOR_BYTES == 64
typedef __m512i Codes;
FASTENC_INLINE VecI add_int8_products(VecI sums, Codes a, Codes b) {
  return (VecI)_mm512_dpbusd_epi32((__m512i)sums, a, b);
}
#else
typedef __m256i Codes;
FASTENC_INLINE VecI add_int8_products(VecI sums, Codes a, Codes b) {
  return (VecI)_mm256_dpbusd_avx_epi32((__m256i)sums, a, b);
}
#endif

// C (count x kRows rows, kVectors vectors). Each tile fetches a part of `ahead`, the panel that a next product reads.
template <int kRows, int kVectors>
static void int8_tiles(
    int64_t count, const uint8_t* a, int64_t lda, const float* ranges, int64_t groups, const Int8Panel& panel, float* c,
    int64_t ldc, bool add, const char* ahead) {
  const char* b = panel.codes;
  for (; count; --count, a += kRows * lda, ranges += 2 * kRows * groups, c += kRows * ldc, ahead += 64) {
    VecI sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = VecI{};
    for (int64_t unit = 0; unit < panel.depth; unit += kInt8Unit)
      for (int64_t k = unit; k < unit + kInt8Unit; k += 4) {
        __builtin_prefetch(ahead + k * kPanel, 0, 2);
        const char* b_row = b + unit * kPanel + (k - unit) * kLanes;
        Codes b_k[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) __builtin_memcpy(&b_k[v], b_row + v * kInt8Tile, sizeof(Codes));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          int32_t terms;
          __builtin_memcpy(&terms, a + r * lda + k, 4);
          const Codes a_k = (Codes)(terms - VecI{});
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[r][v] = add_int8_products(sums[r][v], a_k, b_k[v]);
        }
      }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vec scales = load(panel.scales + v * kLanes), of_low = load(panel.of_low + v * kLanes);
      const Vec bias = panel.bias ? load(panel.bias + v * kLanes) : Vec{};
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        float* target = c + r * ldc + v * kLanes;
        store(target, add_group(add ? load(target) : bias, sums[r][v], ranges + 2 * r * groups, scales, of_low));
      }
    }
  }
}

using Int8Tiles = void (*)(
    int64_t, const uint8_t*, int64_t, const float*, int64_t, const Int8Panel&, float*, int64_t, bool, const char*);

template <int kVectors>
FASTENC_INLINE Int8Tiles int8_tiles_of_rows(int64_t rows) {
  static_assert(kTileRows == 6);
  constexpr Int8Tiles tiles[] = {int8_tiles<1, kVectors>, int8_tiles<2, kVectors>, int8_tiles<3, kVectors>,
                                 int8_tiles<4, kVectors>, int8_tiles<5, kVectors>, int8_tiles<6, kVectors>};
  return tiles[rows - 1];
}

FASTENC_INLINE Int8Tiles int8_tiles_of(int64_t rows, int64_t vectors) {
  if (vectors == 1) return int8_tiles_of_rows<1>(rows);
  if (kTileVectors == 2 || vectors == 2) return int8_tiles_of_rows<2>(rows);
  if (vectors == 3) return int8_tiles_of_rows<kTileVectors - 1>(rows);
  return int8_tiles_of_rows<kTileVectors>(rows);
}

static void int8_multiply_by_vnni(const Int8Product& m) {
  const Int8Groups groups(m.w.depth);
  for (int64_t j = 0; j < m.columns; j += kPanel) {
    const int64_t width = m.columns - j < kPanel ? m.columns - j : kPanel, vectors = width / kLanes;
    for (int64_t g = 0; g < m.a.groups.count; ++g) {
      const Int8Panel panel = int8_panel(m, groups, g, j);
      const char* ahead = g + 1 < m.a.groups.count       ? panel.codes + int8_group_bytes(groups.size)
                          : j + kPanel < m.columns ? int8_panel(m, groups, 0, j + kPanel).codes
                                                   : m.next;
      share_rows(m.rows, [&](int64_t count, int64_t tile_rows, int64_t row) {
        int8_tiles_of(tile_rows, vectors)(
            count, m.a.q + row * m.a.stride + g * groups.size, m.a.stride, m.a.ranges + 2 * (row * m.a.groups.count + g),
            m.a.groups.count, panel, m.c + row * m.c_stride + j, m.c_stride, m.add || g, ahead);
        ahead += 64 * count;
      });
    }
  }
}
