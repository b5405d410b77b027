// Products of 8 bits by AMX, of the operands that VNNI takes. Included for AVX-512 only.

// What one group adds to a block of C: kVectors vectors of kRows rows. All of them are computed before one is stored. Row by
// row like this, a block takes 7 % fewer cycles than one column of vectors after the other (a Xeon).
template <int kRows, int kVectors>
FASTENC_INLINE void int8_add_rows(
    const int32_t* sums, const float* ranges, int64_t next_range, const Vec (&scales)[kVectors],
    const Vec (&of_low)[kVectors], const Vec (&bias)[kVectors], bool add, float* c, int64_t c_stride) {
  Vec values[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      VecI sum;
      __builtin_memcpy(&sum, sums + r * kAmxBlock + v * kLanes, sizeof sum);
      const Vec base = add ? load(c + r * c_stride + v * kLanes) : bias[v];
      values[r][v] = add_group(base, sum, ranges + r * next_range, scales[v], of_low[v]);
    }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(c + r * c_stride + v * kLanes, values[r][v]);
}

template <int kVectors>
static void int8_add_block(
    int64_t rows, const int32_t* sums, const float* ranges, int64_t next_range, const Int8Panel& panel, bool add,
    float* c, int64_t c_stride) {
  Vec scales[kVectors], of_low[kVectors], bias[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    scales[v] = load(panel.scales + v * kLanes);
    of_low[v] = load(panel.of_low + v * kLanes);
    bias[v] = panel.bias ? load(panel.bias + v * kLanes) : Vec{};
  }
  constexpr int kRows = 4;
  int64_t r = 0;
  auto add_rows = [&](auto count) __attribute__((always_inline)) {
    int8_add_rows<count, kVectors>(
        sums + r * kAmxBlock, ranges + r * next_range, next_range, scales, of_low, bias, add, c + r * c_stride,
        c_stride);
    r += count;
  };
  while (r + kRows <= rows) add_rows(std::integral_constant<int, kRows>());
  while (r < rows) add_rows(std::integral_constant<int, 1>());
}

// Rows up to a multiple of 16 are read, and their sums dropped.
static void int8_multiply_by_amx(const Int8Product& m) {
  const Int8Groups groups(m.w.depth);
  const AmxTiles tiles;
  alignas(64) int32_t sums[kAmxBlock * kAmxBlock];
  for (int64_t j = 0; j < m.columns; j += kAmxBlock) {
    const int64_t columns = m.columns - j < kAmxBlock ? m.columns - j : kAmxBlock;
    const auto add_block = columns > kLanes ? int8_add_block<2> : int8_add_block<1>;
    for (int64_t row = 0; row < m.rows; row += kAmxBlock) {
      const int64_t rows = m.rows - row < kAmxBlock ? m.rows - row : kAmxBlock;
      for (int64_t g = 0; g < m.a.groups.count; ++g) {
        const Int8Panel panel = int8_panel(m, groups, g, j);
        amx_block_of(
            rows, columns, (const char*)m.a.q + row * m.a.stride + g * groups.size, m.a.stride,
            {panel.codes, kInt8TileRow, kInt8Tile, kInt8Tiles}, groups.size / kAmxBytes, nullptr, 0, (char*)sums,
            4 * kAmxBlock);
        add_block(
            rows, sums, m.a.ranges + 2 * (row * m.a.groups.count + g), 2 * m.a.groups.count, panel, m.add || g,
            m.c + row * m.c_stride + j, m.c_stride);
      }
    }
  }
}
