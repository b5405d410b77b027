// Whole tensors between bfloat16 and float32, by all threads.
#pragma once
#include "convert.h"
#include "tensors.h"

namespace fastenc {

constexpr int64_t kConvertedElements = 65536;  // the least number that a task converts

inline void widen_all(const Tensor& x, float* target) {
  const auto* source = static_cast<const bfloat16*>(x.const_data_ptr());
  torch::stable::parallel_for(0, x.numel(), kConvertedElements, [&](int64_t begin, int64_t end) {
    FASTENC_CALL(widen, source + begin, target + begin, end - begin);
  });
}

inline void narrow_all(const float* source, Tensor& x) {
  auto* target = static_cast<bfloat16*>(x.mutable_data_ptr());
  torch::stable::parallel_for(0, x.numel(), kConvertedElements, [&](int64_t begin, int64_t end) {
    FASTENC_CALL(narrow, source + begin, target + begin, end - begin);
  });
}

}  // namespace fastenc
