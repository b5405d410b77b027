#pragma once
#include <cuda_runtime.h>

using __half = _Float16;
struct __half2 {
  __half x, y;
};
inline float __half2float(__half v) { return v; }
inline __half __float2half_rn(float v) { return static_cast<__half>(v); }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
