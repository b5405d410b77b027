#include "int8_weights.h"
#include "row_blocks.h"
#include "scratch.h"

namespace fastenc {

Int8Weight checked_int8(
    const char* op, const Tensor& packed, const float* bias, int64_t depth, int64_t columns) {
  STD_TORCH_CHECK(
      has_int8_products(), op, ": needs AVX2, or AVX-512 with VNNI");
  STD_TORCH_CHECK(columns % 16 == 0 && depth % 16 == 0, op, ": widths must be multiples of 16");
  const int64_t width = panel_columns(isa());
  STD_TORCH_CHECK(
      packed.scalar_type() == ScalarType::Char && packed.dim() == 2 && packed.is_contiguous() &&
          packed.size(0) == (columns + width - 1) / width && packed.size(1) == int8_panel_bytes(depth, width),
      op, ": a weight must be (", columns, ", ", depth, "), packed by pack_int8 for this instruction set");
  return {static_cast<const char*>(packed.const_data_ptr()), bias, depth, columns};
}

void parallel_int8_columns(const Int8Product& m) {
  const int64_t width = panel_columns(isa()), panels = (m.columns + width - 1) / width;
  torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    Int8Product share = m;
    share.left = begin * width;
    share.columns = std::min(end * width, m.columns) - share.left;
    share.c += share.left;
    FASTENC_CALL_INT8(int8_multiply, share);
  });
}

namespace {

const float* checked_rows(const char* op, const Tensor& x) {
  STD_TORCH_CHECK(
      x.dim() == 2 && x.scalar_type() == ScalarType::Float && x.is_contiguous() && x.size(1) % 16 == 0 && x.size(1) > 0,
      op, ": x must be contiguous float32 (rows, columns), columns a multiple of 16");
  return static_cast<const float*>(x.const_data_ptr());
}

Tensor pack_int8(std::vector<Tensor> tensors) {
  const Weight weight(tensors);
  STD_TORCH_CHECK(
      has_int8_products(), "pack_int8: needs AVX2, or AVX-512 with VNNI");
  STD_TORCH_CHECK(
      !weight.rows().bf16 && weight.columns() % 16 == 0 && weight.depth() % 16 == 0 && weight.depth() > 0,
      "pack_int8: weights must be float32, their widths multiples of 16");
  const int64_t width = panel_columns(isa()), panels = (weight.columns() + width - 1) / width;
  Tensor packed = empty({panels, int8_panel_bytes(weight.depth(), width)}, ScalarType::Char);
  auto* target = static_cast<char*>(packed.mutable_data_ptr());
  torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) FASTENC_CALL_INT8(int8_pack, weight.rows(), panel, target);
  });
  return packed;
}

// q (rows, columns) and its ranges (rows, groups, 2): scale and low.
std::tuple<Tensor, Tensor> quantise_int8(Tensor x) {
  const float* values = checked_rows("quantise_int8", x);
  const int64_t rows = x.size(0), columns = x.size(1);
  STD_TORCH_CHECK(
      has_int8_products(), "quantise_int8: needs AVX2, or AVX-512 with VNNI");
  const Int8Groups groups(columns);
  Tensor q = empty({rows, columns}, ScalarType::Byte), ranges = empty({rows, groups.count, 2}, ScalarType::Float);
  auto* scratch = reinterpret_cast<char*>(thread_scratch((Int8Rows::bytes(rows, groups) + 3) / 4, Scratch::operands));
  Int8Rows quantised = Int8Rows::in(scratch, rows, groups);
  quantised.ranges = static_cast<float*>(ranges.mutable_data_ptr());
  FASTENC_CALL_INT8(int8_quantise, values, columns, 0, rows, quantised);
  auto* target = static_cast<uint8_t*>(q.mutable_data_ptr());
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(target + row * columns, quantised.q + row * quantised.stride, columns);
  return {q, ranges};
}

Tensor int8_linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t columns) {
  x = as_contiguous(x);
  const float* values = checked_rows("int8_linear", x);
  const int64_t rows = x.size(0), depth = x.size(1);
  const FloatVector bias_values(bias);
  STD_TORCH_CHECK(!bias || bias->numel() == columns, "int8_linear: bias must have a number for each column");
  const Int8Weight weight = checked_int8("int8_linear", packed, bias_values.data(), depth, columns);
  Tensor y = empty({rows, columns}, ScalarType::Float);
  parallel_int8_linear(values, rows, weight, static_cast<float*>(y.mutable_data_ptr()));
  return y;
}

}  // namespace

void parallel_int8_linear(const float* x, int64_t rows, const Int8Weight& weight, float* y) {
  const Int8Groups groups(weight.depth);
  auto quantised = [&](int64_t first, int64_t last) {
    const int64_t bytes = Int8Rows::bytes(last - first, groups);
    char* scratch = reinterpret_cast<char*>(thread_scratch((bytes + 3) / 4, Scratch::operands));
    const Int8Rows block = Int8Rows::in(scratch, last - first, groups);
    FASTENC_CALL_INT8(int8_quantise, x + first * weight.depth, weight.depth, 0, last - first, block);
    return block;
  };
  auto product = [&](const Int8Rows& block, int64_t first, int64_t last) {
    return Int8Product{
        block, weight, 0, last - first, 0, weight.columns, y + first * weight.columns, weight.columns, false,
        weight.packed};
  };
  if (rows <= kInt8FewRows) return parallel_int8_columns(product(quantised(0, rows), 0, rows));
  for_row_blocks(rows, 1, [&](int64_t first, int64_t last) {
    const Int8Product m = product(quantised(first, last), first, last);
    FASTENC_CALL_INT8(int8_multiply, m);
  });
}

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("pack_int8", TORCH_BOX(&pack_int8));
  m.impl("quantise_int8", TORCH_BOX(&quantise_int8));
  m.impl("int8_linear", TORCH_BOX(&int8_linear));
}

}  // namespace fastenc
