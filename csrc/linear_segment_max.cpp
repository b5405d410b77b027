#include "linear_segment_max.h"

#include "column_products.h"
#include "sequences.h"

namespace fastenc {
namespace {

// (maxima (batch, columns) in x's dtype, argmax int32 (batch, columns)); 0 and -1 for an empty sequence.
std::tuple<Tensor, Tensor> forward(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor cu_seqlens) {
  STD_TORCH_CHECK(
      x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1) && is_bfloat16(x) == is_bfloat16(weight),
      "linear_segment_max: x (tokens, width) and weight (columns, width) must have one dtype");
  x = as_contiguous(x);
  weight = as_contiguous(weight);
  cu_seqlens = as_contiguous(cu_seqlens);
  const int64_t tokens = x.size(0), columns = weight.size(0), batch = cu_seqlens.numel() - 1;
  const FloatVector bias_values(bias);
  STD_TORCH_CHECK(!bias || bias->numel() == columns, "linear_segment_max: bias must have a number for each column");
  const int32_t* offsets = checked_offsets("linear_segment_max", cu_seqlens, tokens, tokens);
  const bool bf16 = is_bfloat16(x);
  Tensor y = empty({batch, columns}, x.scalar_type()), argmax = empty({batch, columns}, ScalarType::Int);
  if (!y.numel()) return {y, argmax};
  std::vector<float> wide(bf16 ? y.numel() : 0);
  const SegmentMax a{
      offsets, bf16 ? wide.data() : static_cast<float*>(y.mutable_data_ptr()),
      static_cast<int32_t*>(argmax.mutable_data_ptr()), batch, columns};
  for (int64_t sequence = 0; sequence < batch; ++sequence) {
    if (a.cu_seqlens[sequence] != a.cu_seqlens[sequence + 1]) continue;
    std::fill_n(a.largest + sequence * columns, columns, 0.f);
    std::fill_n(a.argmax + sequence * columns, columns, -1);
  }
  const ColumnProducts products(x, weight, bias_values.data());
  for_panels(columns, [&](int64_t left, int64_t right) {
    float* tile = thread_scratch(products.tile_rows() * kGemmColumns, Scratch::tiles);
    int64_t sequence = 0;
    for (int64_t first = 0; first < tokens; first += products.tile_rows()) {
      const int64_t last = std::min(first + products.tile_rows(), tokens);
      products.compute(first, last, left, right, tile);
      FASTENC_CALL(segment_max_rows, a, tile, first, last, left, right, &sequence);
    }
  });
  if (bf16) narrow_all(wide.data(), y);
  return {y, argmax};
}

SegmentMaxGradient gradient_of(const Tensor& dy, const Tensor& argmax, const Tensor& rows) {
  return {
      dy.const_data_ptr(), static_cast<const int32_t*>(argmax.const_data_ptr()), rows.const_data_ptr(), dy.size(0),
      dy.size(1), rows.size(1)};
}

Tensor input_gradient(Tensor dy, Tensor argmax, Tensor weight, int64_t tokens) {
  dy = as_contiguous(dy);
  argmax = as_contiguous(argmax);
  weight = as_contiguous(weight);
  const bool bf16 = is_bfloat16(dy);
  Tensor dx = empty({tokens, weight.size(1)}, dy.scalar_type());
  std::vector<float> wide(bf16 ? dx.numel() : 0), sums(dx.numel());
  std::vector<int32_t> terms(tokens);
  float* out = bf16 ? wide.data() : static_cast<float*>(dx.mutable_data_ptr());
  if (!bf16) std::fill_n(out, dx.numel(), 0.f);
  const SegmentMaxGradient a = gradient_of(dy, argmax, weight);
  const SegmentMaxSums to{out, sums.data(), terms.data()};
  torch::stable::parallel_for(0, a.batch, 1, [&](int64_t begin, int64_t end) {
    FASTENC_CALL(segment_max_input_gradient, a, bf16, begin, end, to);
  });
  for (int64_t i = 0; i < dx.numel(); ++i) out[i] += sums[i];
  if (bf16) narrow_all(out, dx);
  return dx;
}

Tensor weight_gradient(Tensor dy, Tensor argmax, Tensor x) {
  dy = as_contiguous(dy);
  argmax = as_contiguous(argmax);
  x = as_contiguous(x);
  const bool bf16 = is_bfloat16(dy);
  const int64_t columns = dy.size(1), depth = x.size(1);
  Tensor dweight = empty({columns, depth}, dy.scalar_type());
  const SegmentMaxGradient a = gradient_of(dy, argmax, x);
  for_panels(columns, [&](int64_t left, int64_t right) {
    if (!bf16) {
      float* sums = static_cast<float*>(dweight.mutable_data_ptr()) + left * depth;
      FASTENC_CALL(segment_max_weight_gradient, a, bf16, left, right, sums);
      return;
    }
    float* sums = thread_scratch(kGemmColumns * depth, Scratch::tiles);
    FASTENC_CALL(segment_max_weight_gradient, a, bf16, left, right, sums);
    auto* target = static_cast<bfloat16*>(dweight.mutable_data_ptr()) + left * depth;
    FASTENC_CALL(narrow, sums, target, (right - left) * depth);
  });
  return dweight;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("linear_segment_max_fwd", TORCH_BOX(&forward));
  m.impl("linear_segment_max_dhidden", TORCH_BOX(&input_gradient));
  m.impl("linear_segment_max_dweight", TORCH_BOX(&weight_gradient));
}

}  // namespace fastenc
