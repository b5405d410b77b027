// Products of bfloat16 by AMX with packed weights; see bf16_panels.h. A sum adds 32 terms at a time. Included for AVX-512
// only.

constexpr int64_t kAmxTerms = kAmxBytes / 2;  // of bfloat16 in a tile's row
static_assert(kAmxTerms == kPanelTerms);

// C (rows x columns) = bias + or += A times B's columns [left, left + columns), left a multiple of 16, over `steps` tiles
// of the depth. The bias, or null for 0, is that of these columns. roomy: C has whole tiles of rows, and what lies past the
// last row does not matter.
static void multiply_tiles(
    const TileRows& a, const TilePanels& b, int64_t steps, int64_t left, int64_t columns, const float* bias, bool add,
    float* c, int64_t ldc, int64_t rows, bool roomy = false) {
  alignas(64) float edge[kAmxBlock * kAmxBlock];  // instead of C where it ends inside a tile
  for (int64_t j = 0, width; j < columns; j += width) {
    width = b.width - (left + j) % b.width;
    if (width > kAmxBlock) width = kAmxBlock;
    if (width > columns - j) width = columns - j;
    const AmxPanel panel{b.at(left + j), b.step(), kAmxBytes, kAmxRows * b.step()};
    for (int64_t row = 0; row < rows; row += kAmxBlock) {
      const int64_t count = rows - row < kAmxBlock ? rows - row : kAmxBlock;
      const bool whole = (roomy || count % kAmxRows == 0) && width % kAmxRows == 0;
      float* target = c + row * ldc + j;
      float* sums = whole ? target : edge;
      const int64_t stride = whole ? ldc : kAmxBlock;
      for (int64_t r = 0; !whole && (add || bias) && r < count; ++r)
        __builtin_memcpy(edge + r * kAmxBlock, add ? target + r * ldc : bias + j, width * sizeof(float));
      const float* start = add ? sums : !bias ? nullptr : whole ? bias + j : edge;
      amx_block_of(
          count, width, a.data + row * a.stride, a.stride, panel, steps, (const char*)start,
          start == sums ? 4 * stride : 0, (char*)sums, 4 * stride);
      for (int64_t r = 0; !whole && r < count; ++r)
        __builtin_memcpy(target + r * ldc, edge + r * kAmxBlock, width * sizeof(float));
    }
  }
}
