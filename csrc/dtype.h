// Storage types of the CPU kernels; all arithmetic is float.
#pragma once
#include <cstdint>

namespace fastenc {

struct bfloat16 {
  uint16_t bits;
};

}  // namespace fastenc
