// How the attention ops read q, k and v, and write their gradient side by side.
#pragma once
#include "attention.h"
#include "tensors.h"

namespace fastenc {

inline Tensor rows_contiguous(const Tensor& x) { return x.stride(2) == 1 ? x : as_contiguous(x); }
inline PackedHeads heads_of(const Tensor& x) { return {x.const_data_ptr(), x.stride(0), x.stride(1)}; }

// Sets what the backward of self-attention reads and writes; dout and lse become contiguous. Returns the gradient of q,
// k and v, (tokens, 3, num_heads, head_dim).
template <class SelfAttention>
Tensor set_backward(SelfAttention& a, const Tensor& q, Tensor& dout, Tensor& lse) {
  dout = as_contiguous(dout);
  lse = as_contiguous(lse);
  a.dout = dout.const_data_ptr();
  a.lse = static_cast<float*>(const_cast<void*>(lse.const_data_ptr()));  // only read
  Tensor dqkv = empty({q.size(0), 3, a.num_heads, a.head_dim}, q.scalar_type());
  char* start = static_cast<char*>(dqkv.mutable_data_ptr());
  const int64_t width = a.num_heads * a.head_dim, bytes = width * (is_bfloat16(q) ? 2 : 4);
  a.dq = start;
  a.dk = start + bytes;
  a.dv = start + 2 * bytes;
  a.grad_stride = 3 * width;
  return dqkv;
}

// The gradient of the bias of the projection to q, k and v: float32 (3 * num_heads * head_dim,), or empty.
inline Tensor bias_gradient(const Tensor& dqkv, bool wanted) {
  if (!wanted) return empty({0}, ScalarType::Float);
  const int64_t width = 3 * dqkv.size(2) * dqkv.size(3);
  return sum_columns(dqkv.const_data_ptr(), dqkv.size(0), width, is_bfloat16(dqkv));
}

}  // namespace fastenc
