#include "global_window_attention.h"

#include "tensors.h"

namespace fastenc {
namespace {

constexpr const char* kOp = "global_window_attention";

// What both directions read; it keeps alive what MergedAttention points to.
struct Merge {
  Tensor window, window_lse, others, others_lse;
  bool bf16;
  MergedAttention merged{};

  Merge(const Tensor& window_, const Tensor& window_lse_, const Tensor& others_, const Tensor& others_lse_)
      : window(as_contiguous(window_)),
        window_lse(as_contiguous(window_lse_)),
        others(as_contiguous(others_)),
        others_lse(as_contiguous(others_lse_)),
        bf16(is_bfloat16(window)) {
    STD_TORCH_CHECK(
        window.dim() == 3 && others.dim() == 3 && others.scalar_type() == window.scalar_type(), kOp,
        ": both results must be (tokens, num_heads, head_dim) of one dtype");
    merged.tokens = window.size(0);
    merged.num_heads = window.size(1);
    merged.head_dim = window.size(2);
    for (int64_t i = 0; i < 3; ++i)
      STD_TORCH_CHECK(others.size(i) == window.size(i), kOp, ": both results must have one shape");
    for (const Tensor* lse : {&window_lse, &others_lse})
      STD_TORCH_CHECK(
          lse->scalar_type() == ScalarType::Float && lse->numel() == merged.tokens * merged.num_heads, kOp,
          ": lse must be float32 (num_heads, tokens)");
    merged.window = window.const_data_ptr();
    merged.others = others.const_data_ptr();
    merged.window_lse = static_cast<const float*>(window_lse.const_data_ptr());
    merged.others_lse = static_cast<const float*>(others_lse.const_data_ptr());
  }

  int64_t tokens_of_task() const { return grain(merged.num_heads * merged.head_dim); }
};

Tensor forward(Tensor window, Tensor window_lse, Tensor others, Tensor others_lse) {
  Merge merge(window, window_lse, others, others_lse);
  Tensor out = torch::stable::empty_like(merge.window);
  merge.merged.out = out.mutable_data_ptr();
  torch::stable::parallel_for(0, merge.merged.tokens, merge.tokens_of_task(), [&](int64_t begin, int64_t end) {
    FASTENC_CALL(merge_attention_forward, merge.merged, merge.bf16, begin, end);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    Tensor dout, Tensor window, Tensor window_lse, Tensor others, Tensor others_lse, Tensor key_bias) {
  Merge merge(window, window_lse, others, others_lse);
  MergedAttention& m = merge.merged;
  dout = as_contiguous(dout);
  key_bias = as_contiguous(key_bias);
  STD_TORCH_CHECK(
      dout.scalar_type() == merge.window.scalar_type() && dout.numel() == merge.window.numel() &&
          key_bias.scalar_type() == ScalarType::Float && key_bias.numel() == m.tokens,
      kOp, ": dout must be like the results, key_bias float32 (tokens,)");
  Tensor dwindow = torch::stable::empty_like(merge.window), dothers = torch::stable::empty_like(merge.window);
  Tensor dwindow_lse = empty({m.num_heads, m.tokens}, ScalarType::Float);
  Tensor dothers_lse = empty({m.num_heads, m.tokens}, ScalarType::Float);
  m.dout = dout.const_data_ptr();
  m.key_bias = static_cast<const float*>(key_bias.const_data_ptr());
  m.dwindow = dwindow.mutable_data_ptr();
  m.dothers = dothers.mutable_data_ptr();
  m.dwindow_lse = static_cast<float*>(dwindow_lse.mutable_data_ptr());
  m.dothers_lse = static_cast<float*>(dothers_lse.mutable_data_ptr());
  torch::stable::parallel_for(0, m.tokens, merge.tokens_of_task(), [&](int64_t begin, int64_t end) {
    FASTENC_CALL(merge_attention_backward, m, merge.bf16, begin, end);
  });
  return {dwindow, dwindow_lse, dothers, dothers_lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("global_window_merge_fwd", TORCH_BOX(&forward));
  m.impl("global_window_merge_bwd", TORCH_BOX(&backward));
}

}  // namespace fastenc
