#include "encoder_layer.h"

#include "attention.h"
#include "panels.h"
#include "scratch.h"
#include "sequences.h"

namespace fastenc {

int64_t layer_attention_scratch(const LayerAttention& l, int64_t rows) {
  const int64_t head_dim = l.qkv.columns / 3 / l.num_heads;
  return rows * (l.qkv.columns + l.num_heads) + 16 + attention_forward_scratch(l.max_seqlen, l.max_seqlen, head_dim);
}

int64_t layer_after_attention_scratch(const LayerAfterAttention& l, int64_t rows) {
  return rows * (l.down.columns + kInnerColumns) + 2 * ((l.down.columns + 127) / 128 * 128);
}

namespace {

constexpr int64_t kRows = 96;  // of a block at most

// As many for each thread, so that none waits for another's last one.
int64_t number_of_blocks(int64_t rows) {
  const int64_t threads = torch::stable::get_num_threads();
  return (rows + kRows * threads - 1) / (kRows * threads) * threads;
}

PackedLinear packed(const Tensor& panels, const FloatVector& bias, int64_t depth, int64_t columns) {
  STD_TORCH_CHECK(columns % 16 == 0, "encoder_layer: widths must be multiples of 16");
  return {checked_panels(panels, depth, columns), bias.data(), depth, columns};
}

const float* float_rows(const Tensor& x) {
  STD_TORCH_CHECK(
      x.dim() == 2 && x.scalar_type() == ScalarType::Float && x.is_contiguous(),
      "encoder_layer: rows must be float32 and contiguous");
  return static_cast<const float*>(x.const_data_ptr());
}

Tensor attention(
    Tensor x, Tensor qkv, Tensor qkv_bias, Tensor cu_seqlens, int64_t max_seqlen, int64_t num_heads) {
  x = as_contiguous(x);
  const auto* x_rows = float_rows(x);
  const int64_t rows = x.size(0), columns = qkv_bias.numel(), sequences = cu_seqlens.numel() - 1;
  cu_seqlens = as_contiguous(cu_seqlens);
  const FloatVector bias(qkv_bias);
  const LayerAttention layer{
      packed(qkv, bias, x.size(1), columns), num_heads, checked_offsets(cu_seqlens, rows, max_seqlen), max_seqlen};
  STD_TORCH_CHECK(
      num_heads > 0 && columns % (48 * num_heads) == 0, "encoder_layer: head_dim must be a multiple of 16");
  Tensor mixed = empty({rows, columns / 3}, ScalarType::Float);
  auto* mixed_rows = static_cast<float*>(mixed.mutable_data_ptr());
  const int64_t blocks = number_of_blocks(rows);
  const auto bounds = share_sequences(layer.offsets, sequences, blocks);
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = bounds[block], last = bounds[block + 1];
      const int64_t count = layer.offsets[last] - layer.offsets[first];
      if (!count) continue;  // longer sequences than blocks
      float* scratch = thread_scratch(layer_attention_scratch(layer, count));
      FASTENC_CALL(layer_attention, layer, x_rows, mixed_rows, first, last, scratch);
    }
  });
  return mixed;
}

Tensor after_attention(
    Tensor mixed, Tensor x, Tensor out, Tensor out_bias, Tensor attention_norm_weight, Tensor attention_norm_bias,
    Tensor up, Tensor up_bias, Tensor down, Tensor down_bias, Tensor out_norm_weight, Tensor out_norm_bias, bool tanh,
    double eps) {
  mixed = as_contiguous(mixed);
  x = as_contiguous(x);
  const auto *mixed_rows = float_rows(mixed), *x_rows = float_rows(x);
  const int64_t rows = x.size(0), hidden = x.size(1), inner = up_bias.numel();
  const Tensor of_width[] = {out_bias,  attention_norm_weight, attention_norm_bias,
                             down_bias, out_norm_weight,       out_norm_bias};
  for (const Tensor& t : of_width)
    STD_TORCH_CHECK(t.numel() == hidden, "encoder_layer: weights and biases must have the rows' width");
  STD_TORCH_CHECK(mixed.size(0) == rows, "encoder_layer: mixed must have x's rows");
  const FloatVector vectors[] = {
      FloatVector(out_bias),          FloatVector(up_bias),
      FloatVector(down_bias),         FloatVector(attention_norm_weight),
      FloatVector(attention_norm_bias), FloatVector(out_norm_weight),
      FloatVector(out_norm_bias)};
  const LayerAfterAttention layer{
      packed(out, vectors[0], mixed.size(1), hidden),
      packed(up, vectors[1], hidden, inner),
      packed(down, vectors[2], inner, hidden),
      vectors[3].data(), vectors[4].data(), vectors[5].data(), vectors[6].data(),
      static_cast<float>(eps),
      tanh ? Activation::gelu_tanh : Activation::gelu};
  Tensor y = empty({rows, hidden}, ScalarType::Float);
  auto* y_rows = static_cast<float*>(y.mutable_data_ptr());
  const int64_t blocks = number_of_blocks(rows);
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = rows * block / blocks, last = rows * (block + 1) / blocks;
      float* scratch = thread_scratch(layer_after_attention_scratch(layer, last - first));
      FASTENC_CALL(layer_after_attention, layer, mixed_rows, x_rows, y_rows, first, last, scratch);
    }
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("encoder_layer_attention", TORCH_BOX(&attention));
  m.impl("encoder_layer_after_attention", TORCH_BOX(&after_attention));
}

}  // namespace fastenc
