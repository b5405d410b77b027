// out = softmax(scale * q k^T) v inside each sequence of a packed batch, non-causal.
#pragma once
#include <cstdint>

#include "dropout.h"
#include "isa.h"

namespace fastenc {

struct Attention {
  const void* qkv;  // element (token, part, head, d) at token * stride_token + part * stride_part + head * stride_head + d
  int64_t stride_token, stride_part, stride_head;
  int64_t num_heads, head_dim;  // head_dim a multiple of 16
  float scale;
  Dropout dropout;  // row = token in the batch, stream = head, column = key in the sequence
  void* out;        // forward: (total_tokens, num_heads, head_dim)
  const void* dout;  // backward: like out
  void* dqkv;        // backward: (total_tokens, 3, num_heads, head_dim)
};

constexpr int64_t kAttentionRows = 48;  // query rows whose scores exist at a time

// Floats of scratch that one (sequence, head) task needs.
int64_t attention_forward_scratch(int64_t length, int64_t head_dim);
int64_t attention_backward_scratch(int64_t length, int64_t head_dim);

// One head of the sequence of `length` tokens that starts at `first`.
FASTENC_FOR_EACH_ISA(
    void attention_forward(const Attention&, bool bf16, int64_t first, int64_t length, int64_t head, float* scratch);
    void attention_backward(const Attention&, bool bf16, int64_t first, int64_t length, int64_t head, float* scratch);)

}  // namespace fastenc
