#include "weights.h"

namespace fastenc {

Weight::Weight(const std::vector<Tensor>& tensors) {
  STD_TORCH_CHECK(!tensors.empty() && tensors[0].dim() == 2, "fastenc: a weight must be (out_features, in_features)");
  rows_.bf16 = is_bfloat16(tensors[0]);
  rows_.depth = tensors[0].size(1);
  for (const Tensor& tensor : tensors) {
    STD_TORCH_CHECK(
        tensor.dim() == 2 && tensor.size(1) == rows_.depth && is_bfloat16(tensor) == rows_.bf16,
        "fastenc: weights that are stacked must agree in dtype and in_features");
    held_.push_back(tensor.stride(1) == 1 ? tensor : as_contiguous(tensor));
    const auto* start = static_cast<const char*>(held_.back().const_data_ptr());
    const int64_t row_bytes = held_.back().stride(0) * (rows_.bf16 ? 2 : 4);
    const size_t before = starts_.size();
    starts_.resize(before + tensor.size(0));
    for (size_t row = before; row < starts_.size(); ++row) starts_[row] = start + (row - before) * row_bytes;
  }
  rows_.rows = starts_.data();
  rows_.count = static_cast<int64_t>(starts_.size());
}

void Weight::pack(float* packed) const {
  const int64_t width = panel_columns(isa()), groups = (columns() + width - 1) / width;
  torch::stable::parallel_for(0, groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) FASTENC_CALL(pack_panel_group, rows_, group, packed);
  });
}

void Weight::pack_tiles(float* packed) const {
#if FASTENC_X86
  const int64_t groups = (columns() + kTileColumns - 1) / kTileColumns;
  torch::stable::parallel_for(0, groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) avx512::pack_tile_group(rows_, group, packed);
  });
#endif
}

const float* checked_packed(const Tensor& packed, int64_t depth, int64_t columns) {
  const int64_t width = panel_columns(isa());
  STD_TORCH_CHECK(
      packed.scalar_type() == ScalarType::Float && packed.dim() == 3 && packed.is_contiguous() &&
          packed.size(0) == (columns + width - 1) / width && packed.size(1) == depth && packed.size(2) == width,
      "fastenc: a packed weight must be that of pack_weight for this instruction set, (groups of ", width,
      " columns, in_features, ", width, ")");
  return static_cast<const float*>(packed.const_data_ptr());
}

const float* checked_tiles(const Tensor& packed, int64_t depth, int64_t columns) {
  STD_TORCH_CHECK(
      has_bf16_panels() && packed.scalar_type() == ScalarType::BFloat16 && packed.dim() == 3 &&
          packed.is_contiguous() && packed.size(0) == (columns + kTileColumns - 1) / kTileColumns &&
          packed.size(1) == tile_pairs(depth) && packed.size(2) == 2 * kTileColumns,
      "fastenc: a packed weight must be that of pack_weight for this instruction set, (groups of ", kTileColumns,
      " columns, pairs of in_features, ", 2 * kTileColumns, ")");
  return static_cast<const float*>(packed.const_data_ptr());
}

namespace {

Tensor pack_weight(std::vector<Tensor> tensors) {
  const Weight weight(tensors);
  if (weight.rows().bf16 && has_bf16_panels()) {
    const int64_t groups = (weight.columns() + kTileColumns - 1) / kTileColumns;
    Tensor packed = empty({groups, tile_pairs(weight.depth()), 2 * kTileColumns}, ScalarType::BFloat16);
    weight.pack_tiles(static_cast<float*>(packed.mutable_data_ptr()));
    return packed;
  }
  const int64_t width = panel_columns(isa());
  Tensor packed = empty({(weight.columns() + width - 1) / width, weight.depth(), width}, ScalarType::Float);
  weight.pack(static_cast<float*>(packed.mutable_data_ptr()));
  return packed;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) { m.impl("pack_weight", TORCH_BOX(&pack_weight)); }

}  // namespace fastenc
