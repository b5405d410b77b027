// Attention in which a block of queries sees some blocks of keys of its sequence:
//   s[i, j] = scale * q[i] . k[j] + log n,  n = how often the plan names key j's block for query i's block
//   out[i] = softmax(s[i, :]) v over the keys of the named blocks
// A block of queries for which no block is named has out 0, lse -inf and gradient 0.
#pragma once
#include "attention.h"

namespace fastenc {

struct BlockSparseAttention {
  PackedHeads q, k, v;
  int64_t num_heads, head_dim;  // head_dim a multiple of 16
  int64_t total_tokens;
  float scale;
  int64_t block_size;
  void* out;         // forward: (total_tokens, num_heads, head_dim)
  float* lse;        // (num_heads, total_tokens), natural logarithm; the backward reads it
  const void* dout;  // backward: like out
  void *dq, *dk, *dv;  // backward: (token, head, d) at token * grad_stride + head * head_dim + d
  int64_t grad_stride;
};

// One head of one sequence. starts[i] and starts[i + 1] bound the entries of its block i in columns and counts.
struct BlockSparseTask {
  int64_t first, length, head;
  const int32_t *starts, *columns, *counts;
};

// Floats of scratch that one task needs; `entries`: the most that a block of queries has.
int64_t block_sparse_forward_scratch(int64_t length, int64_t block_size, int64_t entries, int64_t head_dim);
int64_t block_sparse_backward_scratch(int64_t length, int64_t block_size, int64_t entries, int64_t head_dim);

FASTENC_FOR_EACH_ISA(
    void block_sparse_forward(const BlockSparseAttention&, bool bf16, const BlockSparseTask&, float* scratch);
    void block_sparse_backward(const BlockSparseAttention&, bool bf16, const BlockSparseTask&, float* scratch);)

}  // namespace fastenc
