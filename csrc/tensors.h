// What the ops' entry points share: reading torch tensors through the stable ABI.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "dropout.h"
#include "dtype.h"

namespace fastenc {

using torch::stable::Tensor;
using torch::headeronly::ScalarType;

// Python checks this for users; this check guards direct calls of the op.
inline bool is_bfloat16(const Tensor& t) {
  STD_TORCH_CHECK(
      t.scalar_type() == ScalarType::Float || t.scalar_type() == ScalarType::BFloat16,
      "fastenc: CPU kernels take float32 or bfloat16");
  return t.scalar_type() == ScalarType::BFloat16;
}

inline float to_float(bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline bfloat16 to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
}

inline Tensor as_contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

inline Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::empty(torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), dtype);
}

// A vector as float32, converted once if it has another dtype: the kernels read sums, weights and biases as float.
class FloatVector {
 public:
  explicit FloatVector(const std::optional<Tensor>& t) {
    if (!t) return;
    const bool known = t->scalar_type() == ScalarType::Float || t->scalar_type() == ScalarType::BFloat16;
    held_ = as_contiguous(known ? *t : torch::stable::to(*t, ScalarType::Float));
    if (!is_bfloat16(*held_)) {
      data_ = static_cast<const float*>(held_->const_data_ptr());
      return;
    }
    const auto* source = static_cast<const bfloat16*>(held_->const_data_ptr());
    widened_.resize(held_->numel());
    for (size_t i = 0; i < widened_.size(); ++i) widened_[i] = to_float(source[i]);
    data_ = widened_.data();
  }
  const float* data() const { return data_; }

 private:
  std::optional<Tensor> held_;
  std::vector<float> widened_;
  const float* data_ = nullptr;
};

// The least number of rows in a task: with fewer, starting it would cost more than the work.
inline int64_t grain(int64_t width) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width)); }

// Column sums over rows (weight and bias gradients) are formed in a fixed number of row blocks and added
// in order, so that the result does not depend on the number of threads.
struct RowBlocks {
  int64_t rows, count;
  explicit RowBlocks(int64_t rows_) : rows(rows_), count(std::clamp<int64_t>(rows_ / 32, 1, 16)) {}
  int64_t begin(int64_t block) const { return rows * block / count; }
};

// A column sum: each row block accumulates into its own row. Width 0: the sum is not wanted.
class ColumnSums {
 public:
  ColumnSums(const RowBlocks& blocks, int64_t width)
      : count_(blocks.count), width_(width), sums_(blocks.count * width, 0.f) {}
  float* of(int64_t block) { return width_ ? sums_.data() + block * width_ : nullptr; }
  Tensor total() const {
    Tensor result = empty({width_}, ScalarType::Float);
    float* out = static_cast<float*>(result.mutable_data_ptr());
    for (int64_t c = 0; c < width_; ++c) {
      out[c] = 0.f;
      for (int64_t block = 0; block < count_; ++block) out[c] += sums_[block * width_ + c];
    }
    return result;
  }

 private:
  int64_t count_, width_;
  std::vector<float> sums_;
};

// (width,), float32: the sums of a matrix's columns (column_sum.cpp).
Tensor sum_columns(const void* x, int64_t rows, int64_t width, bool bf16);

// Dropout of probability p with the seed and the offset in rng_state; no dropout without rng_state.
inline Dropout make_dropout(double p, const std::optional<Tensor>& rng_state) {
  Dropout dropout;
  if (!rng_state) return dropout;
  STD_TORCH_CHECK(
      rng_state->numel() == 2 && rng_state->is_contiguous() && rng_state->scalar_type() == ScalarType::Long,
      "fastenc: rng_state must be contiguous int64 (2,), seed and offset");
  dropout.threshold = std::min(static_cast<uint32_t>(p * 65536.0 + 0.5), 65535u);  // 65,536 would keep nothing
  const auto* state = static_cast<const int64_t*>(rng_state->const_data_ptr());
  dropout.seed = static_cast<uint64_t>(state[0]);
  dropout.offset = static_cast<uint32_t>(state[1]);
  dropout.scale = 65536.f / static_cast<float>(65536 - dropout.threshold);
  return dropout;
}

}  // namespace fastenc
