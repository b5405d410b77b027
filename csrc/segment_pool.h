// First token, mean or maximum of each packed sequence.
#pragma once
#include <cstdint>

#include "isa.h"

namespace fastenc {

enum class Pooling : int64_t { cls, mean, max };

struct SegmentPool {
  const void* in;             // x (tokens, width), or dy (batch, width) in the backward
  const int32_t* cu_seqlens;  // (batch + 1,)
  void* out;                  // y (batch, width), or dx (tokens, width) in the backward
  int32_t* argmax;            // (batch, width), the token of each maximum; Pooling::max only
  int64_t width;
  Pooling mode;
};

// For the sequences [begin, end); scratch has 2 * width floats, width rounded up to 16.
FASTENC_FOR_EACH_ISA(
    void segment_pool_forward(const SegmentPool&, bool bf16, int64_t begin, int64_t end, float* scratch);
    void segment_pool_backward(const SegmentPool&, bool bf16, int64_t begin, int64_t end);)

}  // namespace fastenc
