// Products of few rows of bfloat16 by AMX (Intel), which multiplies tiles of 16 rows of 64 bytes. It computes C^T = W
// A^T: a tile of W is loaded without packing, and A, which is small, is packed first. Included for AVX-512 only.

constexpr int kAmxRows = 16;
constexpr int kAmxTerms = 32;  // pairs of bfloat16 in a tile's row
constexpr int kAmxSums = 6;    // tiles of sums; of the eight tiles one holds W and one A
constexpr int64_t kAmxFloats = kAmxRows * kAmxRows;

struct alignas(64) AmxConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  AmxConfig() {
    for (int tile = 0; tile < kAmxSums + 2; ++tile) row_bytes[tile] = 64, rows[tile] = kAmxRows;
  }
};

// packed[block of 16 rows][32 terms][pair][row]: a tile's row holds one pair of terms of each of 16 rows of A. Rows and
// terms beyond A's are 0.
void pack_amx_rows(const GemmFewRows& m, float* packed) {
  for (int64_t row = 0; row < m.rows; row += kAmxRows)
    for (int64_t k = 0; k < m.weight.depth; k += kAmxTerms, packed += kAmxFloats) {
      const int64_t left = m.weight.depth - k;
      const __mmask32 terms = left < kAmxTerms ? (1u << left) - 1u : ~0u;
      Vec pairs[kAmxRows];
#pragma GCC unroll 16
      for (int r = 0; r < kAmxRows; ++r) {
        const bfloat16* from = (const bfloat16*)m.a + (row + r) * m.a_row + k;
        pairs[r] = (Vec)_mm512_maskz_loadu_epi16(row + r < m.rows ? terms : 0, from);
      }
      transpose(pairs);
#pragma GCC unroll 16
      for (int r = 0; r < kAmxRows; ++r) store(packed + r * kAmxRows, pairs[r]);
    }
}

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
static void amx_block(const GemmFewRows& m, const float* packed, int64_t row, int64_t left, int64_t count) {
  const int64_t depth = m.weight.depth, steps = (depth + kAmxTerms - 1) / kAmxTerms;
  const AmxWeight weight(m.weight, left, count);
  const float* rows = packed + row / kAmxRows * steps * kAmxFloats;
  const int64_t ahead = left + kAmxRows, last_ahead = ahead + kAmxRows < m.weight.count ? ahead + kAmxRows : ahead;
  alignas(64) bfloat16 copy[kAmxRows * kAmxTerms];
#define FASTENC_ZERO(i) _tile_zero(i)
#define FASTENC_MULTIPLY(i)                                                      \
  _tile_loadd(7, rows + ((i) * steps + step) * kAmxFloats, kAmxRows * 4);      \
  _tile_dpbf16ps(i, 6, 7)
  FASTENC_FOR_EACH_SUM(kBlocks, FASTENC_ZERO);
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t k = step * kAmxTerms;
    if (weight.lies_ready(k)) {
      _tile_loadd(6, weight.at(k), weight.stride());
    } else {
      weight.copy_to(copy, k);
      _tile_loadd(6, copy, kAmxTerms * sizeof(bfloat16));
    }
    for (int64_t o = ahead; o < last_ahead; ++o) __builtin_prefetch((const bfloat16*)m.weight.rows[o] + k);
    FASTENC_FOR_EACH_SUM(kBlocks, FASTENC_MULTIPLY);
  }
  alignas(64) float sums[kBlocks * kAmxFloats];
#define FASTENC_STORE(i) _tile_stored(i, sums + (i) * kAmxFloats, kAmxRows * 4)
  FASTENC_FOR_EACH_SUM(kBlocks, FASTENC_STORE);
#undef FASTENC_ZERO
#undef FASTENC_MULTIPLY
#undef FASTENC_STORE
  const Vec bias = m.bias ? load_n(m.bias + left, (int)count) : Vec{};
  for (int block = 0; block < kBlocks; ++block) {
    Vec columns[kAmxRows];
#pragma GCC unroll 16
    for (int c = 0; c < kAmxRows; ++c) columns[c] = load(sums + block * kAmxFloats + c * kAmxRows);
    transpose(columns);
#pragma GCC unroll 16
    for (int r = 0; r < kAmxRows; ++r) {
      const int64_t to = row + block * kAmxRows + r;
      if (to < m.rows) store_n(m.c + to * m.weight.count + left, columns[r] + bias, (int)count);
    }
  }
}

template <int kBlocks = kAmxSums>
FASTENC_INLINE void amx_blocks(
    int64_t blocks, const GemmFewRows& m, const float* packed, int64_t row, int64_t left, int64_t count) {
  if (blocks == kBlocks)
    amx_block<kBlocks>(m, packed, row, left, count);
  else if constexpr (kBlocks > 1)
    amx_blocks<kBlocks - 1>(blocks, m, packed, row, left, count);
}

void gemm_amx(const GemmFewRows& m, const float* packed, int64_t left, int64_t right) {
  const AmxConfig config;
  _tile_loadconfig(&config);
  const int64_t blocks = (m.rows + kAmxRows - 1) / kAmxRows;
  for (int64_t column = left; column < right; column += kAmxRows)
    for (int64_t block = 0; block < blocks; block += kAmxSums) {
      const int64_t count = right - column < kAmxRows ? right - column : kAmxRows;
      const int64_t most = blocks - block < kAmxSums ? blocks - block : kAmxSums;
      amx_blocks(most, m, packed, block * kAmxRows, column, count);
    }
  _tile_release();
}

#undef FASTENC_FOR_EACH_SUM
