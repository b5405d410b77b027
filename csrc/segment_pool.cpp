#include "segment_pool.h"

#include "sequences.h"

namespace fastenc {
namespace {

const int32_t* offsets_of(const Tensor& cu_seqlens, int64_t tokens) {
  return checked_offsets("segment_pool", cu_seqlens, tokens, tokens);
}

// The least number of sequences in a task.
int64_t sequences(int64_t tokens, int64_t batch, int64_t width) {
  return grain(tokens / std::max<int64_t>(1, batch) * width);
}

// Returns (y, argmax); argmax is empty unless the mode is the maximum.
std::tuple<Tensor, Tensor> forward(Tensor x, Tensor cu_seqlens, int64_t mode) {
  x = as_contiguous(x);
  cu_seqlens = as_contiguous(cu_seqlens);
  const bool bf16 = is_bfloat16(x);
  const int64_t batch = cu_seqlens.numel() - 1, width = x.size(1);
  const bool max = mode == static_cast<int64_t>(Pooling::max);
  Tensor y = empty({batch, width}, x.scalar_type());
  Tensor argmax = max ? empty({batch, width}, ScalarType::Int) : empty({0}, ScalarType::Int);
  const SegmentPool a{
      x.const_data_ptr(), offsets_of(cu_seqlens, x.size(0)), y.mutable_data_ptr(),
      static_cast<int32_t*>(argmax.mutable_data_ptr()), width, static_cast<Pooling>(mode)};
  torch::stable::parallel_for(0, batch, sequences(x.size(0), batch, width), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(2 * ((width + 15) / 16 * 16));
    FASTENC_CALL(segment_pool_forward, a, bf16, begin, end, scratch.data());
  });
  return {y, argmax};
}

Tensor backward(Tensor dy, Tensor argmax, Tensor cu_seqlens, int64_t total_tokens, int64_t mode) {
  dy = as_contiguous(dy);
  cu_seqlens = as_contiguous(cu_seqlens);
  const bool bf16 = is_bfloat16(dy);
  const int64_t batch = dy.size(0), width = dy.size(1);
  Tensor dx = empty({total_tokens, width}, dy.scalar_type());
  const SegmentPool a{
      dy.const_data_ptr(), offsets_of(cu_seqlens, total_tokens), dx.mutable_data_ptr(),
      static_cast<int32_t*>(argmax.mutable_data_ptr()), width, static_cast<Pooling>(mode)};
  torch::stable::parallel_for(0, batch, sequences(total_tokens, batch, width), [&](int64_t begin, int64_t end) {
    FASTENC_CALL(segment_pool_backward, a, bf16, begin, end);
  });
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("segment_pool_fwd", TORCH_BOX(&forward));
  m.impl("segment_pool_bwd", TORCH_BOX(&backward));
}

}  // namespace fastenc
