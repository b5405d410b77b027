#include "linear_segment_log_sum.h"

#include "column_products.h"
#include "sequences.h"

namespace fastenc {
namespace {

constexpr const char* kOp = "linear_segment_log_sum";

// float32 (batch, columns).
Tensor forward(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor cu_seqlens, bool twice) {
  STD_TORCH_CHECK(
      x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1) && is_bfloat16(x) == is_bfloat16(weight),
      kOp, ": x (tokens, width) and weight (columns, width) must have one dtype");
  x = as_contiguous(x);
  weight = as_contiguous(weight);
  cu_seqlens = as_contiguous(cu_seqlens);
  const int64_t tokens = x.size(0), columns = weight.size(0), batch = cu_seqlens.numel() - 1;
  const FloatVector bias_values(bias);
  STD_TORCH_CHECK(!bias || bias->numel() == columns, kOp, ": bias must have a number for each column");
  const int32_t* offsets = checked_offsets(kOp, cu_seqlens, tokens, tokens);
  Tensor y = empty({batch, columns}, ScalarType::Float);
  auto* sums = static_cast<float*>(y.mutable_data_ptr());
  std::fill_n(sums, y.numel(), 0.f);
  if (!y.numel() || !tokens) return y;
  const SegmentLogSum a{offsets, batch, columns, twice};
  const ColumnProducts products(x, weight, bias_values.data());
  for_panels(columns, [&](int64_t left, int64_t right) {
    float* tile = thread_scratch((products.tile_rows() + 1) * kGemmColumns, Scratch::tiles);
    float* lost = tile + products.tile_rows() * kGemmColumns;
    for (int64_t first = 0; first < tokens; first += products.tile_rows()) {
      const int64_t last = std::min(first + products.tile_rows(), tokens);
      products.compute(first, last, left, right, tile);
      FASTENC_CALL(segment_log_sum_rows, a, tile, first, last, left, right, sums, lost);
    }
  });
  return y;
}

// logits: float32 (tokens, columns), overwritten; dsums: float32 (batch, columns).
void gradient(Tensor logits, Tensor dsums, Tensor cu_seqlens, bool twice) {
  cu_seqlens = as_contiguous(cu_seqlens);
  dsums = as_contiguous(dsums);
  const int64_t tokens = logits.size(0), columns = logits.size(1), batch = dsums.size(0);
  STD_TORCH_CHECK(
      logits.is_contiguous() && !is_bfloat16(logits) && !is_bfloat16(dsums) && dsums.size(1) == columns,
      kOp, ": logits and gradients must be contiguous float32 with the same columns");
  const SegmentLogSum a{checked_offsets(kOp, cu_seqlens, tokens, tokens), batch, columns, twice};
  auto* rows = static_cast<float*>(logits.mutable_data_ptr());
  const auto* given = static_cast<const float*>(dsums.const_data_ptr());
  for_panels(columns, [&](int64_t left, int64_t right) {
    FASTENC_CALL(segment_log_sum_gradient, a, rows, given, left, right);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("linear_segment_log_sum_fwd", TORCH_BOX(&forward));
  m.impl("linear_segment_log_sum_gradient_", TORCH_BOX(&gradient));
}

}  // namespace fastenc
