// Products of bfloat16 for few rows by Arm's bfmmla. One of them multiplies two rows of A by two rows of W, four terms of
// each, and adds to a 2 x 2 block of C.

constexpr int kBlockRows = 2, kBlockTerms = 8;  // two bfmmla read what a row's register holds
constexpr int kTileBlocks = 4;                  // 4 x 4 blocks: 16 of 32 registers accumulate

// Terms of two rows side by side: the first four of each, then the last four of each.
struct BlockOperand {
  bfloat16x8_t first, last;
};

// n terms at a and at b, and zeros.
FASTENC_INLINE BlockOperand load_block(const bfloat16* a, const bfloat16* b, int n) {
  bfloat16 ends[kBlockRows][kBlockTerms] = {};
  if (n < kBlockTerms) {
    __builtin_memcpy(ends[0], a, n * sizeof *a);
    __builtin_memcpy(ends[1], b, n * sizeof *b);
    a = ends[0], b = ends[1];
  }
  const float64x2_t x = (float64x2_t)vld1q_bf16((const bfloat16_t*)a), y = (float64x2_t)vld1q_bf16((const bfloat16_t*)b);
  return {(bfloat16x8_t)vzip1q_f64(x, y), (bfloat16x8_t)vzip2q_f64(x, y)};
}

// kBlocks x kTileBlocks blocks of C from `row` and `output` on. A row beyond the last one repeats it and is not stored.
// Also prefetches rows [first_ahead, last_ahead) of W: they lie too far apart for the processor to do it.
template <int kBlocks>
static void block_tile(
    const GemmFewRows& m, int64_t row, int64_t output, int64_t right, int64_t first_ahead, int64_t last_ahead) {
  constexpr int kRows = kBlocks * kBlockRows, kOutputs = kTileBlocks * kBlockRows;
  constexpr int64_t kLine = 32;  // terms of a line of the cache
  const bfloat16 *a[kRows], *w[kOutputs];
  for (int r = 0; r < kRows; ++r) a[r] = (const bfloat16*)m.a + (row + r < m.rows ? row + r : m.rows - 1) * m.a_row;
  for (int o = 0; o < kOutputs; ++o)
    w[o] = (const bfloat16*)m.weight.rows[output + o < right ? output + o : right - 1];
  float32x4_t sums[kBlocks][kTileBlocks] = {};
  auto step = [&](int64_t k, int n) __attribute__((always_inline)) {
    BlockOperand y[kTileBlocks];
#pragma GCC unroll 4
    for (int o = 0; o < kTileBlocks; ++o) y[o] = load_block(w[2 * o] + k, w[2 * o + 1] + k, n);
#pragma GCC unroll 4
    for (int r = 0; r < kBlocks; ++r) {
      const BlockOperand x = load_block(a[2 * r] + k, a[2 * r + 1] + k, n);
#pragma GCC unroll 4
      for (int o = 0; o < kTileBlocks; ++o) sums[r][o] = vbfmmlaq_f32(sums[r][o], x.first, y[o].first);
#pragma GCC unroll 4
      for (int o = 0; o < kTileBlocks; ++o) sums[r][o] = vbfmmlaq_f32(sums[r][o], x.last, y[o].last);
    }
  };
  const int64_t depth = m.weight.depth;
  int64_t k = 0;
  while (k + kBlockTerms <= depth) {
    for (int64_t o = first_ahead; o < last_ahead; ++o) __builtin_prefetch((const bfloat16*)m.weight.rows[o] + k);
    const int64_t end = k + kLine < depth ? k + kLine : depth;
    for (; k + kBlockTerms <= end; k += kBlockTerms) step(k, kBlockTerms);
  }
  if (k < depth) step(k, (int)(depth - k));
  float totals[kRows][kOutputs];
#pragma GCC unroll 4
  for (int r = 0; r < kBlocks; ++r)
#pragma GCC unroll 4
    for (int o = 0; o < kTileBlocks; ++o) {
      vst1_f32(&totals[2 * r][2 * o], vget_low_f32(sums[r][o]));
      vst1_f32(&totals[2 * r + 1][2 * o], vget_high_f32(sums[r][o]));
    }
  for (int r = 0; r < kRows && row + r < m.rows; ++r)
    for (int o = 0; o < kOutputs && output + o < right; ++o)
      m.c[(row + r) * m.weight.count + output + o] = totals[r][o] + (m.bias ? m.bias[output + o] : 0.f);
}

template <int kBlocks = kTileBlocks>
FASTENC_INLINE void block_tile_of(
    int64_t blocks, const GemmFewRows& m, int64_t row, int64_t output, int64_t right, int64_t first_ahead,
    int64_t last_ahead) {
  if (blocks == kBlocks)
    block_tile<kBlocks>(m, row, output, right, first_ahead, last_ahead);
  else if constexpr (kBlocks > 1)
    block_tile_of<kBlocks - 1>(blocks, m, row, output, right, first_ahead, last_ahead);
}

// Tiles divide the rows evenly. Each also prefetches its share of W's rows for the next outputs.
void gemm_pairs(const GemmFewRows& m, int64_t left, int64_t right) {
  constexpr int64_t kOutputs = kTileBlocks * kBlockRows;
  const int64_t blocks = (m.rows + kBlockRows - 1) / kBlockRows, tiles = (blocks + kTileBlocks - 1) / kTileBlocks;
  for (int64_t output = left; output < right; output += kOutputs) {
    const int64_t next = output + kOutputs, room = right - next, most = room < kOutputs ? room : kOutputs;
    const int64_t ahead = most < 0 ? 0 : most;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = blocks * tile / tiles, last = blocks * (tile + 1) / tiles;
      block_tile_of(
          last - first, m, first * kBlockRows, output, right, next + ahead * tile / tiles,
          next + ahead * (tile + 1) / tiles);
    }
  }
}
