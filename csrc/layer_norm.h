// y = Norm(h) * weight + bias,  h = residual + dropout(x + x_bias); Norm is LayerNorm or RMSNorm.
#pragma once
#include <cstdint>

#include "dropout.h"
#include "isa.h"

namespace fastenc {

// Pointers that may be null say so; x, residual, h, y and their gradients hold elements of one storage type.
struct LayerNormForward {
  const void* x;
  const void* residual;  // or null
  const float* x_bias;   // or null
  const float* weight;   // or null: ones
  const float* bias;     // or null: zeros
  void* y;
  void* h;      // or null: not wanted
  float* mean;  // or null
  float* rstd;  // or null
  int64_t width;
  float eps;
  bool rms;
  Dropout dropout;
};

struct LayerNormBackward {
  const void* dy;
  const void* dresidual_sum;  // or null if h was not returned
  const void* h;
  const float* mean;
  const float* rstd;
  const float* weight;  // or null
  void* dh;
  void* dx;  // or null: equal to dh
  // Sums over the rows given to one call. The kernel accumulates, so the caller zeroes them; null where not wanted.
  float* dweight;
  float* dbias;
  float* dx_bias;
  int64_t width;
  bool rms;
  Dropout dropout;
};

// Floats of scratch: the row that is normalised and its dropout scales; the dropout scales of four rows. Static, as
// norm_in_place is (encoder_layer.h).
static inline int64_t layer_norm_forward_scratch(int64_t width) { return 2 * ((width + 127) / 128 * 128); }
static inline int64_t layer_norm_backward_scratch(int64_t width) { return 2 * layer_norm_forward_scratch(width); }

// Rows [begin, end).
FASTENC_FOR_EACH_ISA(
    void layer_norm_forward(const LayerNormForward&, bool bf16, int64_t begin, int64_t end, float* scratch);
    void layer_norm_backward(const LayerNormBackward&, bool bf16, int64_t begin, int64_t end, float* scratch);)

}  // namespace fastenc
