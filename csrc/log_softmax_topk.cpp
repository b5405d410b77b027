#include "log_softmax_topk.h"

#include "tensors.h"

namespace fastenc {
namespace {

std::tuple<Tensor, Tensor> run(Tensor x, int64_t count) {
  STD_TORCH_CHECK(
      x.dim() == 2 && x.scalar_type() == ScalarType::Float, "log_softmax_topk: x must be float32 (rows, width)");
  STD_TORCH_CHECK(
      count > 0 && count <= x.size(1), "log_softmax_topk: count must be in [1, ", x.size(1), "], got ", count);
  if (x.stride(1) != 1) x = as_contiguous(x);
  const int64_t rows = x.size(0), width = x.size(1);
  Tensor values = empty({rows, count}, ScalarType::Float), indices = empty({rows, count}, ScalarType::Long);
  const LogSoftmaxTopk a{
      static_cast<const float*>(x.const_data_ptr()), x.stride(0), width, count,
      static_cast<float*>(values.mutable_data_ptr()), static_cast<int64_t*>(indices.mutable_data_ptr())};
  torch::stable::parallel_for(0, rows, grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) FASTENC_CALL(log_softmax_topk, a, row);
  });
  return {values, indices};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) { m.impl("log_softmax_topk", TORCH_BOX(&run)); }

}  // namespace fastenc
