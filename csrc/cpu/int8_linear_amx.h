// Products of 8 bits by AMX, of the operands that VNNI takes: a tile of A is 16 rows of 64 terms as they lie, a tile of B
// 16 columns of 64 terms, whose rows lie kInt8Step apart in a panel. Included for AVX-512 only.

struct alignas(64) Int8TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  Int8TileConfig() {
    for (int tile = 0; tile < 8; ++tile) row_bytes[tile] = 64, rows[tile] = 16;
  }
};

constexpr int64_t kInt8TileSums = 32;  // rows and columns of the sums of a block of tiles

// sums (16 kRows x 16 kColumns) = A B.
template <int kRows, int kColumns>
static void int8_tile_sums(const uint8_t* a, int64_t lda, const char* b, int64_t depth, int32_t* sums) {
  _tile_zero(0);
  if constexpr (kColumns > 1) _tile_zero(1);
  if constexpr (kRows > 1) _tile_zero(2);
  if constexpr (kRows > 1 && kColumns > 1) _tile_zero(3);
  for (int64_t k = 0; k < depth; k += kInt8Unit) {
    const char* b_k = b + k / 4 * kInt8Step;
    _tile_loadd(4, a + k, lda);
    _tile_loadd(6, b_k, kInt8Step);
    _tile_dpbusd(0, 4, 6);
    if constexpr (kColumns > 1) {
      _tile_loadd(7, b_k + 64, kInt8Step);
      _tile_dpbusd(1, 4, 7);
    }
    if constexpr (kRows > 1) {
      _tile_loadd(5, a + 16 * lda + k, lda);
      _tile_dpbusd(2, 5, 6);
      if constexpr (kColumns > 1) _tile_dpbusd(3, 5, 7);
    }
  }
  constexpr int64_t stride = 4 * kInt8TileSums;
  _tile_stored(0, sums, stride);
  if constexpr (kColumns > 1) _tile_stored(1, sums + 16, stride);
  if constexpr (kRows > 1) _tile_stored(2, sums + 16 * kInt8TileSums, stride);
  if constexpr (kRows > 1 && kColumns > 1) _tile_stored(3, sums + 16 * kInt8TileSums + 16, stride);
}

FASTENC_INLINE void int8_tile_sums_of(
    int64_t rows, int64_t columns, const uint8_t* a, int64_t lda, const char* b, int64_t depth, int32_t* sums) {
  if (rows > 16)
    columns > 16 ? int8_tile_sums<2, 2>(a, lda, b, depth, sums) : int8_tile_sums<2, 1>(a, lda, b, depth, sums);
  else
    columns > 16 ? int8_tile_sums<1, 2>(a, lda, b, depth, sums) : int8_tile_sums<1, 1>(a, lda, b, depth, sums);
}

// Rows up to a multiple of 16 are read, and their sums dropped.
static void int8_multiply_by_amx(const Int8Product& m) {
  const Int8Groups groups(m.w.depth);
  const Int8TileConfig config;
  _tile_loadconfig(&config);
  alignas(64) int32_t sums[kInt8TileSums * kInt8TileSums];
  for (int64_t j = 0; j < m.columns; j += kInt8TileSums) {
    const int64_t columns = m.columns - j < kInt8TileSums ? m.columns - j : kInt8TileSums, inside = j % kPanel;
    for (int64_t row = 0; row < m.rows; row += kInt8TileSums) {
      const int64_t rows = m.rows - row < kInt8TileSums ? m.rows - row : kInt8TileSums;
      for (int64_t g = 0; g < m.a.groups.count; ++g) {
        const Int8Panel panel = int8_panel(m, groups, g, j - inside);
        int8_tile_sums_of(
            rows, columns, m.a.q + row * m.a.stride + g * groups.size, m.a.stride,
            panel.group + 4 * (kPanel + inside), groups.size, sums);
        for (int64_t v = 0; v < columns; v += kLanes) {
          const int64_t column = inside + v;
          const Vec scales = load(panel.scales + column), of_low = load((const float*)panel.group + column);
          const Vec bias = panel.bias ? load(panel.bias + column) : Vec{};
          for (int64_t r = 0; r < rows; ++r) {
            float* target = m.c + (row + r) * m.c_stride + j + v;
            VecI sum;
            __builtin_memcpy(&sum, sums + r * kInt8TileSums + v, sizeof sum);
            const float* range = m.a.ranges + 2 * ((row + r) * m.a.groups.count + g);
            store(target, add_group(m.add || g ? load(target) : bias, sum, range, scales, of_low));
          }
        }
      }
    }
  }
  _tile_release();
}
