// Products of 8 bits for the ops: their weights as tensors, and their division among threads.
#pragma once
#include "int8_linear.h"
#include "weights.h"

namespace fastenc {

constexpr int64_t kInt8FewRows = 128;  // of which the threads share out the columns

// Of at most 96 rows each; as many for each thread, so that none waits for another's last one.
inline int64_t int8_row_blocks(int64_t rows) {
  constexpr int64_t kRows = 96;
  const int64_t threads = torch::stable::get_num_threads();
  return (rows + kRows * threads - 1) / (kRows * threads) * threads;
}

// A weight that the op pack_int8 has packed. op: the op that was called, for the errors.
Int8Weight checked_int8(const char* op, const Tensor& packed, const float* bias, int64_t depth, int64_t columns);

// Of few rows: the threads share out the columns. Rows of c are c_stride apart; left is 0.
void parallel_int8_columns(const Int8Product&);

// y = x W^T + bias of contiguous rows of floats.
void parallel_int8_linear(const float* x, int64_t rows, const Int8Weight&, float* y);

}  // namespace fastenc
