// Products of 8 bits by AMX, of the operands that VNNI takes. Included for AVX-512 only.

// Rows up to a multiple of 16 are read, and their sums dropped.
static void int8_multiply_by_amx(const Int8Product& m) {
  const Int8Groups groups(m.w.depth);
  const AmxTiles tiles;
  alignas(64) int32_t sums[kAmxBlock * kAmxBlock];
  auto codes_of = [&](int64_t g, int64_t column) {
    const int64_t inside = column % kPanel;
    return int8_panel(m, groups, g, column - inside).group + 4 * (kPanel + inside);
  };
  for (int64_t j = 0; j < m.columns; j += kAmxBlock) {
    const int64_t columns = m.columns - j < kAmxBlock ? m.columns - j : kAmxBlock, inside = j % kPanel;
    for (int64_t row = 0; row < m.rows; row += kAmxBlock) {
      const int64_t rows = m.rows - row < kAmxBlock ? m.rows - row : kAmxBlock;
      for (int64_t g = 0; g < m.a.groups.count; ++g) {
        const Int8Panel panel = int8_panel(m, groups, g, j - inside);
        const char* ahead = row                         ? nullptr
                            : g + 1 < m.a.groups.count  ? codes_of(g + 1, j)
                            : j + kAmxBlock < m.columns ? codes_of(0, j + kAmxBlock)
                                                        : m.next;
        amx_block_of(
            rows, columns, (const char*)m.a.q + row * m.a.stride + g * groups.size, m.a.stride, codes_of(g, j),
            kInt8Step, groups.size / kAmxBytes, nullptr, 0, (char*)sums, 4 * kAmxBlock, ahead);
        for (int64_t v = 0; v < columns; v += kLanes) {
          const int64_t column = inside + v;
          const Vec scales = load(panel.scales + column), of_low = load((const float*)panel.group + column);
          const Vec bias = panel.bias ? load(panel.bias + column) : Vec{};
          for (int64_t r = 0; r < rows; ++r) {
            float* target = m.c + (row + r) * m.c_stride + j + v;
            VecI sum;
            __builtin_memcpy(&sum, sums + r * kAmxBlock + v, sizeof sum);
            const float* range = m.a.ranges + 2 * ((row + r) * m.a.groups.count + g);
            store(target, add_group(m.add || g ? load(target) : bias, sum, range, scales, of_low));
          }
        }
      }
    }
  }
}
