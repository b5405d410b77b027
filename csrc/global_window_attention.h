// Attention of one query over two disjoint sets of keys, from its attention over each of them:
//   out = w out_1 + (1 - w) out_2,  w = exp(lse_1) / (exp(lse_1) + exp(lse_2)).
// The sets are the keys in the query's window and the global keys. A query without any key has out 0.
#pragma once
#include <cstdint>

#include "isa.h"

namespace fastenc {

struct MergedAttention {
  const void *window, *others;           // (tokens, num_heads, head_dim), results of the two
  const float *window_lse, *others_lse;  // (num_heads, tokens), -inf without a key
  int64_t tokens, num_heads, head_dim;
  void* out;  // forward
  // Backward. Rows whose key_bias is negative, the global tokens', have a result from elsewhere: their gradients are 0.
  const void* dout;
  const float* key_bias;  // (tokens,)
  void *dwindow, *dothers;
  float *dwindow_lse, *dothers_lse;
};

// The tokens [begin, end).
FASTENC_FOR_EACH_ISA(
    void merge_attention_forward(const MergedAttention&, bool bf16, int64_t begin, int64_t end);
    void merge_attention_backward(const MergedAttention&, bool bf16, int64_t begin, int64_t end);)

}  // namespace fastenc
