// The sums of log(1 + ReLU(x W^T + b)) over the tokens of each packed sequence, and their gradient.
#pragma once
#include <cstdint>

#include "isa.h"

namespace fastenc {

struct SegmentLogSum {
  const int32_t* cu_seqlens;  // (batch + 1,)
  int64_t batch, columns;
  bool twice;  // log(1 + log(1 + ReLU))
};

FASTENC_FOR_EACH_ISA(
    // Adds the rows [first, last) of the columns [left, right) to sums (batch, columns); product (rows, right - left).
    // Called for the rows in order. lost (right - left): between calls, what the sums of the sequence that goes on have
    // lost to rounding.
    void segment_log_sum_rows(
        const SegmentLogSum&, const float* product, int64_t first, int64_t last, int64_t left, int64_t right,
        float* sums, float* lost);
    // In place, of the columns [left, right) of logits (tokens, columns): the gradient with respect to them, given that
    // with respect to their sums.
    void segment_log_sum_gradient(
        const SegmentLogSum&, float* logits, const float* dsums, int64_t left, int64_t right);)

}  // namespace fastenc
