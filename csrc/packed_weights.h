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

// The rows of an unpacked weight, or of several weights stacked by rows. Each row is contiguous.
struct WeightRows {
  const void* const* rows;
  int64_t count, depth;
  bool bf16;
};

FASTENC_FOR_EACH_ISA(
    // Packs the columns of one group.
    void pack_panel_group(const WeightRows&, int64_t group, float* packed);)

}  // namespace fastenc
