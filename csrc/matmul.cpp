#include "matmul.h"

#include "panels.h"

namespace fastenc {
namespace {

// Rows of a task: packing a panel of B should cost little beside its products, and A's rows stay in the second cache.
constexpr int64_t kLeastRows = 192, kMostRows = 512;

// Of the rows: as few as give each thread several tasks.
int64_t number_of_parts(int64_t rows, int64_t panels) {
  const int64_t threads = torch::stable::get_num_threads();
  return std::clamp(4 * threads / panels, (rows + kMostRows - 1) / kMostRows, std::max<int64_t>(1, rows / kLeastRows));
}

Tensor with_unit_stride(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::Float, "matmul: both must be float32 matrices");
  return x.stride(0) == 1 || x.stride(1) == 1 ? x : as_contiguous(x);
}

// m lacks A and C.
void multiply_into(Tensor& c, const Tensor& a_, Matmul m) {
  const Tensor a = with_unit_stride(a_);
  STD_TORCH_CHECK(
      m.depth > 0 && a.size(1) == m.depth && c.size(0) == a.size(0) && c.size(1) == m.columns && c.is_contiguous(),
      "matmul: the sizes must be (rows, depth), (depth, columns) and (rows, columns)");
  if (!c.numel()) return;
  m.a = static_cast<const float*>(a.const_data_ptr());
  m.a_row = a.stride(0);
  m.a_depth = a.stride(1);
  m.c = static_cast<float*>(c.mutable_data_ptr());
  m.rows = a.size(0);
  const int64_t panels = (m.columns + kMatmulColumns - 1) / kMatmulColumns;
  const int64_t parts = number_of_parts(m.rows, panels);
  torch::stable::parallel_for(0, panels * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t part = task / panels, left = task % panels * kMatmulColumns;
      FASTENC_CALL(
          matmul_block, m, m.rows * part / parts, m.rows * (part + 1) / parts, left,
          std::min(left + kMatmulColumns, m.columns));
    }
  });
}

void multiply_into(Tensor& c, const Tensor& a, const Tensor& b_, const float* bias, bool add) {
  const Tensor b = with_unit_stride(b_);
  Matmul m{};
  m.b = static_cast<const float*>(b.const_data_ptr());
  m.b_depth = b.stride(0);
  m.b_column = b.stride(1);
  m.depth = b.size(0);
  m.columns = b.size(1);
  m.bias = bias;
  m.add = add;
  multiply_into(c, a, m);
}

Tensor multiply(Tensor a, Tensor b, std::optional<Tensor> bias) {
  Tensor c = empty({a.size(0), b.size(1)}, ScalarType::Float);
  const FloatVector bias_values(bias);
  STD_TORCH_CHECK(!bias || bias->numel() == c.size(1), "matmul: bias must have a number for each column");
  multiply_into(c, a, b, bias_values.data(), false);
  return c;
}

Tensor multiply_packed(Tensor a, Tensor panels, std::optional<Tensor> bias, int64_t columns) {
  const FloatVector bias_values(bias);
  STD_TORCH_CHECK(!bias || bias->numel() == columns, "matmul: bias must have a number for each column");
  Tensor c = empty({a.size(0), columns}, ScalarType::Float);
  Matmul m{};
  m.depth = a.size(1);
  m.panels = checked_panels(panels, m.depth, columns);
  m.columns = columns;
  m.bias = bias_values.data();
  multiply_into(c, a, m);
  return c;
}

void multiply_add(Tensor c, Tensor a, Tensor b) { multiply_into(c, a, b, nullptr, true); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("matmul", TORCH_BOX(&multiply));
  m.impl("matmul_add_", TORCH_BOX(&multiply_add));
  m.impl("matmul_packed", TORCH_BOX(&multiply_packed));
}

}  // namespace fastenc
