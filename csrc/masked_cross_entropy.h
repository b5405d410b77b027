// Softmax cross-entropy of some rows of a logits matrix, with its gradient in the same pass.
#pragma once
#include <cstdint>

#include "isa.h"

namespace fastenc {

struct MaskedCrossEntropy {
  const void* logits;     // (rows, vocabulary), rows contiguous
  const int64_t* labels;  // (rows,)
  int64_t vocabulary;
  float label_smoothing, z_loss;
  float scale;      // factor of the gradient
  float* losses;    // (rows,)
  void* dlogits;    // or null; may be `logits` itself
};

FASTENC_FOR_EACH_ISA(
    void masked_cross_entropy(const MaskedCrossEntropy&, bool bf16, int64_t row);
    void scale_row(void* row, bool bf16, int64_t width, float factor);)

}  // namespace fastenc
