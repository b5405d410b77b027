// Weights as tensors: plain, (out_features, in_features) and perhaps several one above the other, or packed.
#pragma once
#include "packed_weights.h"
#include "tensors.h"

namespace fastenc {

// A plain weight of float32 or bfloat16; keeps alive what it points to.
class Weight {
 public:
  explicit Weight(const std::vector<Tensor>& tensors);
  Weight(const Weight&) = delete;  // rows_ points into starts_
  int64_t columns() const { return rows_.count; }
  int64_t depth() const { return rows_.depth; }
  const WeightRows& rows() const { return rows_; }
  void pack(float* packed) const;  // packed_floats(columns(), depth()) floats

 private:
  std::vector<Tensor> held_;
  std::vector<const void*> starts_;
  WeightRows rows_{};
};

// The floats of a weight that the op pack_weight has packed.
const float* checked_packed(const Tensor& packed, int64_t depth, int64_t columns);

}  // namespace fastenc
