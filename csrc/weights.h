// Weights as tensors: packed, or unpacked as (out_features, in_features), perhaps several stacked by rows.
#pragma once
#include "packed_weights.h"
#include "tensors.h"

namespace fastenc {

// An unpacked weight of float32 or bfloat16. It keeps its tensors alive.
class Weight {
 public:
  explicit Weight(const std::vector<Tensor>& tensors);
  Weight(const Weight&) = delete;  // rows_ points into starts_
  int64_t columns() const { return rows_.count; }
  int64_t depth() const { return rows_.depth; }
  const WeightRows& rows() const { return rows_; }
  void pack(float* packed) const;  // packed_floats(columns(), depth()) floats
  // Of bfloat16 in pairs, where has_bf16_panels(): tile_weight_floats(columns(), depth()) floats.
  void pack_tiles(float* packed) const;

 private:
  std::vector<Tensor> held_;
  std::vector<const void*> starts_;
  WeightRows rows_{};
};

// The floats of a weight that the op pack_weight has packed.
const float* checked_packed(const Tensor& packed, int64_t depth, int64_t columns);
// The pairs of one of bfloat16.
const float* checked_tiles(const Tensor& packed, int64_t depth, int64_t columns);

}  // namespace fastenc
