// Tiles of AMX (Intel): 16 rows of 64 bytes. For products of 8 bits and of bfloat16: FASTENC_MULTIPLY_TILES(sums, a, b) is
// the instruction of one of them. An instruction contains its tiles' numbers, so each is written out. Included for
// AVX-512 only.

constexpr int64_t kAmxBytes = 64;            // of a tile's row
constexpr int64_t kAmxBlock = 2 * kAmxRows;  // rows and columns of 2 x 2 tiles of sums

struct alignas(64) AmxConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  constexpr AmxConfig() {
    for (int tile = 0; tile < 8; ++tile) row_bytes[tile] = kAmxBytes, rows[tile] = kAmxRows;
  }
};

// The thread can use tiles as long as it lives.
class AmxTiles {
 public:
  AmxTiles() {
    static constexpr AmxConfig config;
    _tile_loadconfig(&config);
  }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
};

// Tiles of B. A tile's row has 4 bytes of the depth for each of 16 columns, and the next row lies `stride` bytes further. The
// tile of the next 16 columns lies next_columns bytes further, that of the next 64 bytes of the depth next_depth.
struct AmxPanel {
  const char* data;
  int64_t stride, next_columns, next_depth;
};

// g++ does not know that an instruction reads memory: what was written before must lie there.
FASTENC_INLINE void finish_writes() { __asm__ volatile("" ::: "memory"); }

// The 16 kRows x 16 kColumns sums of 4 bytes that lie at `sums`, `stride` bytes from row to row, become
// start + A B over `steps` tiles of the depth. A's rows lie lda bytes apart. start: the first of such sums; their rows may
// be the same one (start_stride 0); null for 0. Nothing is fetched ahead. On a Xeon, fetching the next panel made products 2 to
// 20 % slower where the weights lie in the second cache, and at most 2 % faster where they do not.
template <int kRows, int kColumns>
static void amx_block(
    const char* a, int64_t lda, const AmxPanel& b, int64_t steps, const char* start, int64_t start_stride, char* sums,
    int64_t stride) {
  finish_writes();
  if (start) {
    _tile_loadd(0, start, start_stride);
    if constexpr (kColumns > 1) _tile_loadd(1, start + kAmxBytes, start_stride);
    if constexpr (kRows > 1) _tile_loadd(2, start + kAmxRows * start_stride, start_stride);
    if constexpr (kRows > 1 && kColumns > 1)
      _tile_loadd(3, start + kAmxRows * start_stride + kAmxBytes, start_stride);
  } else {
    _tile_zero(0);
    if constexpr (kColumns > 1) _tile_zero(1);
    if constexpr (kRows > 1) _tile_zero(2);
    if constexpr (kRows > 1 && kColumns > 1) _tile_zero(3);
  }
  const char* tile = b.data;
  for (int64_t step = 0; step < steps; ++step, a += kAmxBytes, tile += b.next_depth) {
    _tile_loadd(4, a, lda);
    _tile_loadd(6, tile, b.stride);
    FASTENC_MULTIPLY_TILES(0, 4, 6);
    if constexpr (kColumns > 1) {
      _tile_loadd(7, tile + b.next_columns, b.stride);
      FASTENC_MULTIPLY_TILES(1, 4, 7);
    }
    if constexpr (kRows > 1) {
      _tile_loadd(5, a + kAmxRows * lda, lda);
      FASTENC_MULTIPLY_TILES(2, 5, 6);
      if constexpr (kColumns > 1) FASTENC_MULTIPLY_TILES(3, 5, 7);
    }
  }
  _tile_stored(0, sums, stride);
  if constexpr (kColumns > 1) _tile_stored(1, sums + kAmxBytes, stride);
  if constexpr (kRows > 1) _tile_stored(2, sums + kAmxRows * stride, stride);
  if constexpr (kRows > 1 && kColumns > 1) _tile_stored(3, sums + kAmxRows * stride + kAmxBytes, stride);
}

// The same for the tiles that `rows` and `columns`, at most kAmxBlock, need.
FASTENC_INLINE void amx_block_of(
    int64_t rows, int64_t columns, const char* a, int64_t lda, const AmxPanel& b, int64_t steps, const char* start,
    int64_t start_stride, char* sums, int64_t stride) {
  const auto block = rows > kAmxRows ? columns > kAmxRows ? amx_block<2, 2> : amx_block<2, 1>
                     : columns > kAmxRows ? amx_block<1, 2> : amx_block<1, 1>;
  block(a, lda, b, steps, start, start_stride, sums, stride);
}
