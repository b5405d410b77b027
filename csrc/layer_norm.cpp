#include "layer_norm.h"

#include "tensors.h"

namespace fastenc {
namespace {

// Returns (y, h, mean, rstd). h is empty where it would equal x. h, mean and rstd are empty unless `save`.
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(
    Tensor x, std::optional<Tensor> residual, std::optional<Tensor> x_bias, std::optional<Tensor> weight,
    std::optional<Tensor> bias, std::optional<Tensor> rng_state, double dropout_p, double eps, bool rms, bool save) {
  x = as_contiguous(x);
  if (residual) residual = as_contiguous(*residual);
  const bool bf16 = is_bfloat16(x);
  const int64_t width = x.size(x.dim() - 1), rows = width ? x.numel() / width : 0;
  const bool fused = residual || x_bias || rng_state;
  FloatVector x_bias_values(x_bias), weight_values(weight), bias_values(bias);
  Tensor y = torch::stable::empty_like(x);
  Tensor h = save && fused ? torch::stable::empty_like(x) : empty({0}, x.scalar_type());
  Tensor mean = empty({save ? rows : 0}, ScalarType::Float), rstd = empty({save ? rows : 0}, ScalarType::Float);

  LayerNormForward a{};
  a.x = x.const_data_ptr();
  a.residual = residual ? residual->const_data_ptr() : nullptr;
  a.x_bias = x_bias_values.data();
  a.weight = weight_values.data();
  a.bias = bias_values.data();
  a.y = y.mutable_data_ptr();
  a.h = save && fused ? h.mutable_data_ptr() : nullptr;
  a.mean = save ? static_cast<float*>(mean.mutable_data_ptr()) : nullptr;
  a.rstd = save ? static_cast<float*>(rstd.mutable_data_ptr()) : nullptr;
  a.width = width;
  a.eps = static_cast<float>(eps);
  a.rms = rms;
  a.dropout = make_dropout(dropout_p, rng_state);
  torch::stable::parallel_for(0, rows, grain(width), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(layer_norm_forward_scratch(width));
    FASTENC_CALL(layer_norm_forward, a, bf16, begin, end, scratch.data());
  });
  return {y, h, mean, rstd};
}

// Returns (dh, dx, dweight, dbias, dx_bias). dh is the residual's gradient. dresidual_sum is the gradient of h if the
// forward returned h. dx is empty where it would equal dh. The sums are float32 and empty unless wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor dy, std::optional<Tensor> dresidual_sum, Tensor h, Tensor mean, Tensor rstd, std::optional<Tensor> weight,
    std::optional<Tensor> rng_state, double dropout_p, bool rms, bool wants_affine, bool wants_x_bias) {
  dy = as_contiguous(dy);
  if (dresidual_sum) dresidual_sum = as_contiguous(*dresidual_sum);
  const bool bf16 = is_bfloat16(h);
  const int64_t width = h.size(h.dim() - 1), rows = width ? h.numel() / width : 0;
  FloatVector weight_values(weight);
  Tensor dh = torch::stable::empty_like(h);
  Tensor dx = rng_state ? torch::stable::empty_like(h) : empty({0}, h.scalar_type());
  LayerNormBackward common{};
  common.dy = dy.const_data_ptr();
  common.dresidual_sum = dresidual_sum ? dresidual_sum->const_data_ptr() : nullptr;
  common.h = h.const_data_ptr();
  common.mean = static_cast<const float*>(mean.const_data_ptr());
  common.rstd = static_cast<const float*>(rstd.const_data_ptr());
  common.weight = weight_values.data();
  common.dh = dh.mutable_data_ptr();
  common.dx = rng_state ? dx.mutable_data_ptr() : nullptr;
  common.width = width;
  common.rms = rms;
  common.dropout = make_dropout(dropout_p, rng_state);

  const RowBlocks blocks(rows);
  ColumnSums dweight(blocks, wants_affine ? width : 0), dbias(blocks, wants_affine ? width : 0);
  ColumnSums dx_bias(blocks, wants_x_bias ? width : 0);
  torch::stable::parallel_for(0, blocks.count, 1, [&](int64_t first, int64_t last) {
    std::vector<float> scratch(layer_norm_backward_scratch(width));
    for (int64_t block = first; block < last; ++block) {
      LayerNormBackward a = common;
      a.dweight = dweight.of(block);
      a.dbias = dbias.of(block);
      a.dx_bias = dx_bias.of(block);
      FASTENC_CALL(layer_norm_backward, a, bf16, blocks.begin(block), blocks.begin(block + 1), scratch.data());
    }
  });
  return {dh, dx, dweight.total(), dbias.total(), dx_bias.total()};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("layer_norm_fwd", TORCH_BOX(&forward));
  m.impl("layer_norm_bwd", TORCH_BOX(&backward));
}

}  // namespace fastenc
