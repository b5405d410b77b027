// C = A B + bias or C += A B, float32.
#pragma once
#include <cstdint>

#include "isa.h"

namespace fastenc {

// Element (row, k) of A is at row * a_row + k * a_depth, (k, column) of B at k * b_depth + column * b_column; one
// stride of each is 1. C's rows are contiguous.
struct Matmul {
  const float* a;
  int64_t a_row, a_depth;
  const float* b;
  int64_t b_depth, b_column;
  const float* panels;  // in place of b: packed as panels.h says
  const float* bias;    // or null
  float* c;
  int64_t rows, columns, depth;
  bool add;  // to what C holds
};

constexpr int64_t kMatmulColumns = 64;  // of a task, and of packed panels

FASTENC_FOR_EACH_ISA(
    // Rows [first, last) of columns [left, right).
    void matmul_block(const Matmul&, int64_t first, int64_t last, int64_t left, int64_t right);)

}  // namespace fastenc
