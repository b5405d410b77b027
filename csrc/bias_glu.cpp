#include "bias_glu.h"

#include "tensors.h"

namespace fastenc {
namespace {

Tensor forward(Tensor x, std::optional<Tensor> bias, int64_t activation) {
  x = as_contiguous(x);
  const bool bf16 = is_bfloat16(x);
  const int64_t width = x.size(x.dim() - 1) / 2, rows = width ? x.numel() / (2 * width) : 0;
  FloatVector bias_values(bias);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = width;
  Tensor y = torch::stable::empty(sizes, x.scalar_type());
  const BiasGlu a{x.const_data_ptr(), bias_values.data(), nullptr, y.mutable_data_ptr(), nullptr, width,
                  static_cast<Activation>(activation)};
  torch::stable::parallel_for(0, rows, grain(width), [&](int64_t begin, int64_t end) {
    FASTENC_CALL(bias_glu_forward, a, bf16, begin, end);
  });
  return y;
}

// (dx, dbias); dbias is float32 and empty without a bias.
std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor x, std::optional<Tensor> bias, int64_t activation) {
  dy = as_contiguous(dy);
  x = as_contiguous(x);
  const bool bf16 = is_bfloat16(x);
  const int64_t width = x.size(x.dim() - 1) / 2, rows = width ? x.numel() / (2 * width) : 0;
  FloatVector bias_values(bias);
  Tensor dx = torch::stable::empty_like(x);
  const RowBlocks blocks(rows);
  ColumnSums dbias(blocks, bias ? 2 * width : 0);
  torch::stable::parallel_for(0, blocks.count, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const BiasGlu a{x.const_data_ptr(), bias_values.data(), dy.const_data_ptr(), dx.mutable_data_ptr(),
                      dbias.of(block), width, static_cast<Activation>(activation)};
      FASTENC_CALL(bias_glu_backward, a, bf16, blocks.begin(block), blocks.begin(block + 1));
    }
  });
  return {dx, dbias.total()};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("bias_glu_fwd", TORCH_BOX(&forward));
  m.impl("bias_glu_bwd", TORCH_BOX(&backward));
}

}  // namespace fastenc
