// The greatest log-probabilities of each row of logits.
#pragma once
#include <cstdint>

#include "isa.h"

namespace fastenc {

struct LogSoftmaxTopk {
  const float* x;  // (rows, width); its rows are `stride` apart
  int64_t stride, width, count;  // count <= width
  float* values;                 // (rows, count), descending
  int64_t* indices;              // (rows, count); of equal values the first column comes first
};

FASTENC_FOR_EACH_ISA(void log_softmax_topk(const LogSoftmaxTopk&, int64_t row);)

}  // namespace fastenc
