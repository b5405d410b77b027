// sums[c] += the sum of x[row, c] over the rows: the gradient of a bias.
#pragma once
#include <cstdint>

#include "isa.h"

namespace fastenc {

FASTENC_FOR_EACH_ISA(void column_sum(const void* x, int64_t width, bool bf16, int64_t begin, int64_t end, float* sums);)

}  // namespace fastenc
