// out = softmax(scale * q k^T) v inside each sequence of a packed batch, non-causal.
#pragma once
#include <cstdint>

#include "dropout.h"
#include "isa.h"

namespace fastenc {

// Element (token, head, d) is at token * token_stride + head * head_stride + d.
struct PackedHeads {
  const void* data;
  int64_t token_stride, head_stride;
};

struct Attention {
  PackedHeads q, k, v;
  int64_t num_heads, head_dim;  // head_dim a multiple of 16
  int64_t total_q;
  float scale;
  Dropout dropout;  // row = query in the batch, stream = head, column = key in the sequence
  void* out;        // forward: (total_q, num_heads, head_dim)
  float* lse;       // forward: (num_heads, total_q), natural logarithm
  const void* dout;   // backward: like out
  const float* dlse;  // backward: like lse, or null
  void *dq, *dk, *dv;  // backward: (token, head, d) at token * grad_stride + head * head_dim + d
  int64_t grad_stride;
};

// One head of one sequence, whose queries and keys start at these rows.
struct AttentionTask {
  int64_t first_q, length_q, first_k, length_k, head;
};

constexpr int64_t kAttentionRows = 48;  // query rows whose scores exist at a time

// Floats of scratch that one task needs.
int64_t attention_forward_scratch(int64_t length_k, int64_t head_dim);
int64_t attention_backward_scratch(int64_t length_k, int64_t head_dim);

FASTENC_FOR_EACH_ISA(
    void attention_forward(const Attention&, bool bf16, const AttentionTask&, float* scratch);
    void attention_backward(const Attention&, bool bf16, const AttentionTask&, float* scratch);)

}  // namespace fastenc
