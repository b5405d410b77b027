// y = gelu(x + bias), erf or tanh form.
#pragma once
#include <cstdint>

#include "activation.h"
#include "isa.h"

namespace fastenc {

struct BiasGelu {
  const void* x;
  const float* bias;  // or null
  const void* dy;     // backward only
  void* out;          // y, or dx in the backward
  float* dbias;       // backward only: accumulated into; or null
  int64_t width;
  Activation activation;  // gelu or gelu_tanh
};

FASTENC_FOR_EACH_ISA(
    void bias_gelu_forward(const BiasGelu&, bool bf16, int64_t begin, int64_t end);
    void bias_gelu_backward(const BiasGelu&, bool bf16, int64_t begin, int64_t end);)

}  // namespace fastenc
