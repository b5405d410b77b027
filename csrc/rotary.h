// y[d] = x[d] cos - x[d + half] sin,  y[d + half] = x[d + half] cos + x[d] sin for d < half, half = rotary_dim / 2,
// with the angles of the token's position in its sequence. The other elements of a head are copied.
#pragma once
#include <cstdint>

#include "isa.h"

namespace fastenc {

struct Rotary {
  const void* x;  // element (token, head, d) at token * token_stride + head * head_stride + d
  void* y;        // (tokens, num_heads, head_dim), of the same storage type
  const float* table;  // (positions, rotary_dim): the cosines of a position's angles, then their sines
  int64_t token_stride, head_stride, num_heads, head_dim, rotary_dim;
  bool inverse;  // rotates by the negative angles: the gradient
};

// Rotates tokens [begin, end) of one sequence; the first of them is at `position` in it.
FASTENC_FOR_EACH_ISA(void rotary(const Rotary&, bool bf16, int64_t begin, int64_t end, int64_t position);)

}  // namespace fastenc
