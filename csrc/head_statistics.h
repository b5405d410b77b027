// Statistics of each query's attention probabilities p[i, j] = softmax_j(scale * q[i] . k[j] + relative_bias[j - i]), j
// over the sequence and window of i:
//   entropy = -sum_j p ln p,  distance = sum_j p |j - i|,  p at the first, last, same, previous, next and target key,
//   and the key with the highest p.
#pragma once
#include <cstdint>

#include "attention.h"
#include "isa.h"

namespace fastenc {

constexpr int64_t kHeadStatistics = 8;

struct HeadStatistics {
  Attention attention;     // only q, k, sizes, scale, window and relative_bias are read
  bool skip_ends;          // the strongest key is neither the first nor the last, unless the query sees no other
  const int32_t* targets;  // (total,), -1: none; or null
  float* statistics;       // (total, num_heads, kHeadStatistics)
  int32_t* strongest;      // (total, num_heads)
};

// Floats of scratch that a sequence of this length needs.
int64_t head_statistics_scratch(int64_t length, int64_t head_dim);

FASTENC_FOR_EACH_ISA(void head_statistics(
    const HeadStatistics&, bool bf16, int64_t first, int64_t length, int64_t head, float* scratch);)

}  // namespace fastenc
