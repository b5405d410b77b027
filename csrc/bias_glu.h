// y = act(x_a + b_a) * (x_b + b_b), where x = (x_a, x_b) and bias = (b_a, b_b) are halves of a row.
#pragma once
#include <cstdint>

#include "activation.h"
#include "isa.h"

namespace fastenc {

struct BiasGlu {
  const void* x;      // (rows, 2 * width)
  const float* bias;  // (2 * width,) or null
  const void* dy;     // (rows, width), backward only
  void* out;          // y (rows, width), or dx (rows, 2 * width) in the backward
  float* dbias;       // (2 * width,), backward only: accumulated into; or null
  int64_t width;      // of one half
  Activation activation;
};

FASTENC_FOR_EACH_ISA(
    void bias_glu_forward(const BiasGlu&, bool bf16, int64_t begin, int64_t end);
    void bias_glu_backward(const BiasGlu&, bool bf16, int64_t begin, int64_t end);)

}  // namespace fastenc
