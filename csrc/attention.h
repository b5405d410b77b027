// out = softmax(s) v in each sequence of a packed batch, non-causal, where
//   s[i, j] = scale * q[i] . k[j] + relative_bias[d] - alibi_slope * |d| + key_bias[j],
//   d = j - (i + length_k - length_q), so that the last query and the last key are at distance 0.
// Query i sees key j if -window_left <= d <= window_right. A query that sees no key has out 0, lse -inf and gradient 0.
#pragma once
#include <cstdint>

#include "disentangled_attention.h"
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
  int64_t group = 1;            // heads of q that share a head of k and v: head h reads head h / group
  int64_t total_q;
  float scale;
  Dropout dropout;  // row = query in the batch, stream = head, column = key in the sequence
  Dropout global_dropout;  // of a task's global keys: column = key among them
  int64_t window_left = -1, window_right = -1;  // -1: no limit
  const float* alibi_slopes = nullptr;          // (num_heads,), or null
  const float* relative_bias = nullptr;         // (num_heads, 2 * relative_radius + 1), or null; d is clamped
  int64_t relative_radius = 0;
  const float* key_bias = nullptr;  // (total_k,), or null
  const float* rotary = nullptr;    // q and k are rotated by this table as they are read: see rotary.h; or null
  int64_t rotary_dim = 0;
  // RMSNorm of each query and each key before the rotation, by these weights (head_dim,); or null. Forward only.
  const float *query_norm = nullptr, *key_norm = nullptr;
  float head_norm_eps = 0.f;
  const PositionTables* positions = nullptr;  // or null; queries and keys are those of one sequence, without a window
  void* out;                        // forward: (total_q, num_heads, head_dim)
  float* lse;                       // (num_heads, total_q), natural logarithm; the backward reads it
  const void* dout;                 // backward: like out
  const float* dlse;                // backward: like lse, or null
  void *dq, *dk, *dv;  // backward: (token, head, d) at token * stride + head * head_dim + d
  int64_t grad_stride, key_grad_stride;  // the strides of dq, and of dk and dv
  // Backward, or null: for each task, the sum of the score gradients at each distance. A task's length_q + length_k - 1
  // sums begin at head * ddistance_stride + first_q + first_k; the first is at distance 1 - length_k.
  float* ddistance = nullptr;
  int64_t ddistance_stride = 0;
};

// Sets the tensors of `a` to q, k and v in the columns of one matrix of floats. Static, because every instruction set
// compiles a copy.
static inline void set_packed(Attention& a, const float* qkv) {
  const int64_t width = a.num_heads * a.head_dim, key_width = width / a.group, columns = width + 2 * key_width;
  a.q = {qkv, columns, a.head_dim};
  a.k = {qkv + width, columns, a.head_dim};
  a.v = {qkv + width + key_width, columns, a.head_dim};
}

// One head of one sequence, whose queries and keys start at these rows. In the backward it is a head of k and v, and
// the task has all heads of q that read it, so that their sum does not depend on the number of threads.
struct AttentionTask {
  int64_t first_q, length_q, first_k, length_k, head;
  // Keys of the sequence that every query sees, outside its window too: their rows of k and v. key_bias hides them from
  // the windows, so that no query counts them twice.
  const int64_t* global_keys = nullptr;
  int64_t num_global_keys = 0;
};

constexpr int64_t kAttentionRows = 48;  // rows of a block of queries; scores exist for one block at a time

// Floats of scratch that one task needs.
int64_t attention_forward_scratch(int64_t length_q, int64_t length_k, int64_t head_dim);
int64_t attention_backward_scratch(int64_t length_q, int64_t length_k, int64_t head_dim);

FASTENC_FOR_EACH_ISA(
    void attention_forward(const Attention&, bool bf16, const AttentionTask&, float* scratch);
    void attention_backward(const Attention&, bool bf16, const AttentionTask&, float* scratch);)

#if FASTENC_X86
// The forward of heads [task.head, last_head) of float q, k and v with products of bfloat16, where has_bf16_panels();
// without dropout and lse. bf16: a.out is.
namespace avx512 {
void attention_bf16(const Attention&, bool bf16, AttentionTask task, int64_t last_head, float* scratch);
}  // namespace avx512
#endif

// Floats of scratch that one task of these needs.
int64_t attention_bf16_scratch(int64_t length_q, int64_t length_k, int64_t head_dim);

}  // namespace fastenc
