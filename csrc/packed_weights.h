// A packed weight: a weight (columns, depth) in float32, in the order in which the products read it. Each group of
// panel_columns() columns is a matrix (depth, panel_columns()); the last group is padded with 0.
#pragma once
#include <cstdint>

#include "isa.h"

namespace fastenc {

// Columns of a panel: those of a register tile.
inline int64_t panel_columns(Isa isa) { return isa == Isa::avx512 ? 64 : isa == Isa::baseline ? 8 : 16; }

inline int64_t packed_floats(int64_t columns, int64_t depth) {
  const int64_t width = panel_columns(isa());
  return (columns + width - 1) / width * width * depth;
}

// A weight of bfloat16 packed in pairs, where has_bf16_panels(): groups of kTileColumns columns. A group is a matrix
// (tile_pairs(depth), kTileColumns) of pairs of terms; the last group and the depth are filled up with 0. A pair is as
// large as a float. AVX512-BF16 and AMX read the same layout. A block of AMX's tiles has 32 columns, as a group has, so
// its product reads a group from end to end. In wider groups it would read only a part of each row, and so use only a
// part of the cache's sets.
constexpr int64_t kTileColumns = 32;
inline int64_t tile_pairs(int64_t depth) { return (depth + 31) / 32 * 16; }
inline int64_t tile_weight_floats(int64_t columns, int64_t depth) {
  return (columns + kTileColumns - 1) / kTileColumns * kTileColumns * tile_pairs(depth);
}

// The rows that such a weight multiplies, in bfloat16: whole tiles of AMX. (A stride that is a multiple of 4096 bytes
// would map all rows to the same lines of the cache.)
constexpr int64_t kAmxRows = 16;
inline int64_t tile_row_bytes(int64_t depth) { return 4 * tile_pairs(depth); }
inline int64_t tile_row_stride(int64_t depth) { return tile_row_bytes(depth) + 64; }
inline int64_t tile_rows_floats(int64_t rows, int64_t depth) {
  return (rows + kAmxRows - 1) / kAmxRows * kAmxRows * (tile_row_stride(depth) / 4);
}

// The rows of an unpacked weight, or of several weights stacked by rows. Each row is contiguous.
struct WeightRows {
  const void* const* rows;
  int64_t count, depth;
  bool bf16;
};

FASTENC_FOR_EACH_ISA(
    // Packs the columns of one group.
    void pack_panel_group(const WeightRows&, int64_t group, float* packed);)

#if FASTENC_X86
namespace avx512 {
void pack_tile_group(const WeightRows&, int64_t group, float* packed);  // of bfloat16
}  // namespace avx512
#endif

}  // namespace fastenc
