#include "matmul.h"

#include "tensors.h"

namespace fastenc {
namespace {

constexpr int64_t kRows = 192;  // of a task at least, so that packing a panel of B costs little beside its products

Tensor with_unit_stride(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::Float, "matmul: both must be float32 matrices");
  return x.stride(0) == 1 || x.stride(1) == 1 ? x : as_contiguous(x);
}

void multiply_into(Tensor& c, const Tensor& a_, const Tensor& b_, const float* bias, bool add) {
  const Tensor a = with_unit_stride(a_), b = with_unit_stride(b_);
  STD_TORCH_CHECK(
      a.size(1) > 0 && a.size(1) == b.size(0) && c.size(0) == a.size(0) && c.size(1) == b.size(1) && c.is_contiguous(),
      "matmul: the sizes must be (rows, depth), (depth, columns) and (rows, columns)");
  if (!c.numel()) return;
  const auto* a_data = static_cast<const float*>(a.const_data_ptr());
  const auto* b_data = static_cast<const float*>(b.const_data_ptr());
  const Matmul m{a_data, a.stride(0), a.stride(1), b_data, b.stride(0), b.stride(1), bias,
                 static_cast<float*>(c.mutable_data_ptr()), a.size(0), b.size(1), a.size(1), add};
  const int64_t panels = (m.columns + kMatmulColumns - 1) / kMatmulColumns;
  const int64_t parts = std::max<int64_t>(1, m.rows / kRows);
  torch::stable::parallel_for(0, panels * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t part = task / panels, left = task % panels * kMatmulColumns;
      FASTENC_CALL(
          matmul_block, m, m.rows * part / parts, m.rows * (part + 1) / parts, left,
          std::min(left + kMatmulColumns, m.columns));
    }
  });
}

Tensor multiply(Tensor a, Tensor b, std::optional<Tensor> bias) {
  Tensor c = empty({a.size(0), b.size(1)}, ScalarType::Float);
  const FloatVector bias_values(bias);
  STD_TORCH_CHECK(!bias || bias->numel() == c.size(1), "matmul: bias must have a number for each column");
  multiply_into(c, a, b, bias_values.data(), false);
  return c;
}

void multiply_add(Tensor c, Tensor a, Tensor b) { multiply_into(c, a, b, nullptr, true); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("matmul", TORCH_BOX(&multiply));
  m.impl("matmul_add_", TORCH_BOX(&multiply_add));
}

}  // namespace fastenc
