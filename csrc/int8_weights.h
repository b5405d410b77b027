// Products of 8 bits for the ops: their weights as tensors, and their division among threads.
#pragma once
#include "int8_linear.h"
#include "weights.h"

namespace fastenc {

constexpr int64_t kInt8FewRows = 128;  // of which the threads share out the columns

// A weight that the op pack_int8 has packed. op: the op that was called, for the errors.
Int8Weight checked_int8(const char* op, const Tensor& packed, const float* bias, int64_t depth, int64_t columns);

// A product of few rows: the threads divide the columns. Rows of c are c_stride apart; left is 0.
void parallel_int8_columns(const Int8Product&);

// y = x W^T + bias of contiguous rows of floats.
void parallel_int8_linear(const float* x, int64_t rows, const Int8Weight&, float* y);

}  // namespace fastenc
