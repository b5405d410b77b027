// Products of few rows of bfloat16 by AMX. They compute C^T = W A^T: a tile of W is loaded without packing, and A, which is
// small, is packed first. A sum has the bits of multiply_tiles'. Included for AVX-512 only.

constexpr int kAmxSums = 6;    // tiles of sums; of the eight tiles one holds W and one A
constexpr int64_t kAmxFloats = kAmxRows * kAmxRows;

// 16 rows of W and their stride. If the rows have no common stride, are fewer than 16 or end in fewer than 32 terms,
// they are copied into `copy` and padded with 0.
class AmxWeight {
 public:
  AmxWeight(const WeightRows& w, int64_t first, int64_t count) : w_(w), first_(first), count_(count) {
    stride_ = count == kAmxRows ? (const char*)w.rows[first + 1] - (const char*)w.rows[first] : 0;
    for (int64_t r = 2; r < count && stride_; ++r)
      if ((const char*)w.rows[first + r] - (const char*)w.rows[first + r - 1] != stride_) stride_ = 0;
  }
  bool lies_ready(int64_t k) const { return stride_ && k + kAmxTerms <= w_.depth; }
  const void* at(int64_t k) const { return (const bfloat16*)w_.rows[first_] + k; }
  int64_t stride() const { return stride_; }
  void copy_to(bfloat16* copy, int64_t k) const {
    const int64_t left = w_.depth - k, terms = left < kAmxTerms ? left : kAmxTerms;
    __builtin_memset(copy, 0, kAmxRows * kAmxTerms * sizeof(bfloat16));
    for (int64_t r = 0; r < count_; ++r)
      __builtin_memcpy(copy + r * kAmxTerms, (const bfloat16*)w_.rows[first_ + r] + k, terms * sizeof(bfloat16));
  }

 private:
  const WeightRows& w_;
  int64_t first_, count_, stride_;
};

// AMX instructions contain the tile's number, so each is written out.
#define FASTENC_FOR_EACH_SUM(kBlocks, body)    \
  do {                                         \
    body(0);                                   \
    if constexpr (kBlocks > 1) { body(1); }    \
    if constexpr (kBlocks > 2) { body(2); }    \
    if constexpr (kBlocks > 3) { body(3); }    \
    if constexpr (kBlocks > 4) { body(4); }    \
    if constexpr (kBlocks > 5) { body(5); }    \
  } while (0)

// Columns [left, left + count), count at most 16, of kBlocks blocks of 16 rows from `row` on. Also prefetches the rows
// of W that the next columns need.
template <int kBlocks>
static void amx_few_rows_block(const GemmFewRows& m, const float* packed, int64_t row, int64_t left, int64_t count) {
  const int64_t depth = m.weight.depth, steps = (depth + kAmxTerms - 1) / kAmxTerms;
  const AmxWeight weight(m.weight, left, count);
  const float* rows = packed + row / kAmxRows * steps * kAmxFloats;
  const int64_t ahead = left + kAmxRows, last_ahead = ahead + kAmxRows < m.weight.count ? ahead + kAmxRows : ahead;
  alignas(64) bfloat16 copy[kAmxRows * kAmxTerms];
  alignas(64) float start[kAmxFloats];  // the bias of each column, which is a tile's row
#pragma GCC unroll 16
  for (int c = 0; c < kAmxRows; ++c) store(start + c * kAmxRows, splat(m.bias && c < count ? m.bias[left + c] : 0.f));
  finish_writes();
#define FASTENC_START(i) _tile_loadd(i, start, kAmxBytes)
#define FASTENC_MULTIPLY(i)                                                      \
  _tile_loadd(7, rows + ((i) * steps + step) * kAmxFloats, kAmxRows * 4);      \
  FASTENC_MULTIPLY_TILES(i, 6, 7)
  FASTENC_FOR_EACH_SUM(kBlocks, FASTENC_START);
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t k = step * kAmxTerms;
    if (weight.lies_ready(k)) {
      _tile_loadd(6, weight.at(k), weight.stride());
    } else {
      weight.copy_to(copy, k);
      finish_writes();
      _tile_loadd(6, copy, kAmxTerms * sizeof(bfloat16));
    }
    for (int64_t o = ahead; o < last_ahead; ++o) __builtin_prefetch((const bfloat16*)m.weight.rows[o] + k);
    FASTENC_FOR_EACH_SUM(kBlocks, FASTENC_MULTIPLY);
  }
  alignas(64) float sums[kBlocks * kAmxFloats];
#define FASTENC_STORE(i) _tile_stored(i, sums + (i) * kAmxFloats, kAmxRows * 4)
  FASTENC_FOR_EACH_SUM(kBlocks, FASTENC_STORE);
#undef FASTENC_START
#undef FASTENC_MULTIPLY
#undef FASTENC_STORE
  for (int block = 0; block < kBlocks; ++block) {
    Vec columns[kAmxRows];
#pragma GCC unroll 16
    for (int c = 0; c < kAmxRows; ++c) columns[c] = load(sums + block * kAmxFloats + c * kAmxRows);
    transpose(columns);
#pragma GCC unroll 16
    for (int r = 0; r < kAmxRows; ++r) {
      const int64_t to = row + block * kAmxRows + r;
      if (to < m.rows) store_n(m.c + to * m.weight.count + left, columns[r], (int)count);
    }
  }
}

template <int kBlocks = kAmxSums>
FASTENC_INLINE void amx_few_rows_blocks(
    int64_t blocks, const GemmFewRows& m, const float* packed, int64_t row, int64_t left, int64_t count) {
  if (blocks == kBlocks)
    amx_few_rows_block<kBlocks>(m, packed, row, left, count);
  else if constexpr (kBlocks > 1)
    amx_few_rows_blocks<kBlocks - 1>(blocks, m, packed, row, left, count);
}

// packed: by pack_pair_rows.
static void gemm_amx(const GemmFewRows& m, const float* packed, int64_t left, int64_t right) {
  const AmxTiles tiles;
  const int64_t blocks = (m.rows + kAmxRows - 1) / kAmxRows;
  for (int64_t column = left; column < right; column += kAmxRows)
    for (int64_t block = 0; block < blocks; block += kAmxSums) {
      const int64_t count = right - column < kAmxRows ? right - column : kAmxRows;
      const int64_t most = blocks - block < kAmxSums ? blocks - block : kAmxSums;
      amx_few_rows_blocks(most, m, packed, block * kAmxRows, column, count);
    }
}

#undef FASTENC_FOR_EACH_SUM
