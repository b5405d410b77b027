// The maxima of x W^T + b over the tokens of each packed sequence, and their gradient.
#pragma once
#include <cstdint>

#include "isa.h"

namespace fastenc {

struct SegmentMax {
  const int32_t* cu_seqlens;  // (batch + 1,)
  float* largest;             // (batch, columns)
  int32_t* argmax;            // (batch, columns), the row of x of each maximum
  int64_t batch, columns;
};

struct SegmentMaxGradient {
  const void* dy;         // (batch, columns)
  const int32_t* argmax;  // (batch, columns); negative where a sequence is empty
  const void* rows;       // what is added up: x (tokens, depth) for dW, W (columns, depth) for dx
  int64_t batch, columns, depth;
};

FASTENC_FOR_EACH_ISA(
    // Takes the rows [first, last) of the columns [left, right) into the maxima; product (rows, right - left). Called for
    // the rows in order: `sequence` is 0 at first, and then what the call before left there.
    void segment_max_rows(
        const SegmentMax&, const float* product, int64_t first, int64_t last, int64_t left, int64_t right,
        int64_t* sequence);
    // sums (right - left, depth) = the rows [left, right) of dW.
    void segment_max_weight_gradient(const SegmentMaxGradient&, bool bf16, int64_t left, int64_t right, float* sums);
    // dx (tokens, depth) += the gradient of the sequences [begin, end).
    void segment_max_input_gradient(const SegmentMaxGradient&, bool bf16, int64_t begin, int64_t end, float* dx);)

}  // namespace fastenc
