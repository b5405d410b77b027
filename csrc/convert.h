// Rows between bfloat16 and float32.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "isa.h"

namespace fastenc {

FASTENC_FOR_EACH_ISA(
    void widen(const bfloat16* source, float* target, int64_t count);
    void narrow(const float* source, bfloat16* target, int64_t count);)

}  // namespace fastenc
