// A layer's weight (columns, depth) in the order in which our products read it, in float32: groups of panel_columns()
// columns, the last filled up with 0, each (depth, panel_columns()).
#pragma once
#include <cstdint>

#include "isa.h"

namespace fastenc {

// Columns of a panel: those of a register tile.
inline int64_t panel_columns(Isa isa) { return isa == Isa::avx512 ? 64 : isa == Isa::avx2 ? 16 : 8; }

inline int64_t packed_floats(int64_t columns, int64_t depth) {
  const int64_t width = panel_columns(isa());
  return (columns + width - 1) / width * width * depth;
}

// A plain weight's rows, or those of several one above the other; the elements of a row are contiguous.
struct WeightRows {
  const void* const* rows;
  int64_t count, depth;
  bool bf16;
};

FASTENC_FOR_EACH_ISA(
    // Packs the columns of one group.
    void pack_panel_group(const WeightRows&, int64_t group, float* packed);)

}  // namespace fastenc
