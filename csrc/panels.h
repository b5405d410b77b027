// Weights packed once for our products: groups of kMatmulColumns columns, the last filled up, each (depth, columns).
#pragma once
#include "matmul.h"
#include "tensors.h"

namespace fastenc {

inline const float* checked_panels(const Tensor& panels, int64_t depth, int64_t columns) {
  STD_TORCH_CHECK(
      panels.scalar_type() == ScalarType::Float && panels.dim() == 3 && panels.is_contiguous() &&
          panels.size(0) == (columns + kMatmulColumns - 1) / kMatmulColumns && panels.size(1) == depth &&
          panels.size(2) == kMatmulColumns,
      "matmul: panels must be (groups of 64 columns, depth, 64)");
  return static_cast<const float*>(panels.const_data_ptr());
}

}  // namespace fastenc
