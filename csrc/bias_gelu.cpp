#include "bias_gelu.h"

#include "tensors.h"

namespace fastenc {
namespace {

Activation form(bool tanh) { return tanh ? Activation::gelu_tanh : Activation::gelu; }

void forward_into(Tensor y, const Tensor& x, const std::optional<Tensor>& bias, bool tanh) {
  const bool bf16 = is_bfloat16(x);
  const int64_t width = x.size(x.dim() - 1), rows = width ? x.numel() / width : 0;
  FloatVector bias_values(bias);
  const BiasGelu a{x.const_data_ptr(), bias_values.data(), nullptr, y.mutable_data_ptr(), nullptr, width, form(tanh)};
  torch::stable::parallel_for(0, rows, grain(width), [&](int64_t begin, int64_t end) {
    FASTENC_CALL(bias_gelu_forward, a, bf16, begin, end);
  });
}

Tensor forward(Tensor x, std::optional<Tensor> bias, bool tanh) {
  x = as_contiguous(x);
  Tensor y = torch::stable::empty_like(x);
  forward_into(y, x, bias, tanh);
  return y;
}

// x is contiguous.
void in_place(Tensor x, std::optional<Tensor> bias, bool tanh) { forward_into(x, x, bias, tanh); }

// (dx, dbias); dbias is float32 and empty without a bias.
std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor x, std::optional<Tensor> bias, bool tanh) {
  dy = as_contiguous(dy);
  x = as_contiguous(x);
  const bool bf16 = is_bfloat16(x);
  const int64_t width = x.size(x.dim() - 1), rows = width ? x.numel() / width : 0;
  FloatVector bias_values(bias);
  Tensor dx = torch::stable::empty_like(x);
  const RowBlocks blocks(rows);
  ColumnSums dbias(blocks, bias ? width : 0);
  torch::stable::parallel_for(0, blocks.count, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const BiasGelu a{x.const_data_ptr(), bias_values.data(), dy.const_data_ptr(), dx.mutable_data_ptr(),
                       dbias.of(block), width, form(tanh)};
      FASTENC_CALL(bias_gelu_backward, a, bf16, blocks.begin(block), blocks.begin(block + 1));
    }
  });
  return {dx, dbias.total()};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("bias_gelu_", TORCH_BOX(&in_place));
  m.impl("bias_gelu_fwd", TORCH_BOX(&forward));
  m.impl("bias_gelu_bwd", TORCH_BOX(&backward));
}

}  // namespace fastenc
