// A dropout mask: see cpu/dropout.h for the bits behind it.
#pragma once
#include <cstdint>

namespace fastenc {

struct Dropout {
  uint64_t seed = 0;
  uint32_t offset = 0;
  uint32_t threshold = 0;  // an element is kept if its 16 random bits are >= threshold; 0: no dropout
  float scale = 1.f;       // 1 / probability of keeping
};

}  // namespace fastenc
