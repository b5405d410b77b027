// 16-byte vectors of float, half and bfloat16, and rows that need not begin on their boundaries.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

namespace fastenc::cuda {

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline void from_float(float f, float& v) { v = f; }
__device__ inline void from_float(float f, __half& v) { v = __float2half_rn(f); }
__device__ inline void from_float(float f, __nv_bfloat16& v) { v = __float2bfloat16_rn(f); }

// 2^x to a relative 2^-22 in one instruction; results below the normal range are 0.
__device__ inline float fast_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return exp2f(x);
#endif
}

// Two neighbours at a time: one instruction converts both.
__device__ inline float2 pair_to_float(float2 v) { return v; }
__device__ inline float2 pair_to_float(__half2 v) { return __half22float2(v); }
__device__ inline float2 pair_to_float(__nv_bfloat162 v) { return __bfloat1622float2(v); }
__device__ inline void pair_from_float(float a, float b, float2& v) { v = make_float2(a, b); }
__device__ inline void pair_from_float(float a, float b, __half2& v) { v = __floats2half2_rn(a, b); }
__device__ inline void pair_from_float(float a, float b, __nv_bfloat162& v) { v = __floats2bfloat162_rn(a, b); }

template <class T>
struct PairOf;
template <>
struct PairOf<float> {
  using type = float2;
};
template <>
struct PairOf<__half> {
  using type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};

template <class T>
struct Vector {
  static constexpr int kLanes = 16 / sizeof(T);
  uint4 bits;

  __device__ void unpack(float (&values)[kLanes]) const {
    const auto* pairs = reinterpret_cast<const typename PairOf<T>::type*>(&bits);
#pragma unroll
    for (int i = 0; i < kLanes / 2; ++i) {
      const float2 pair = pair_to_float(pairs[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
  __device__ void pack(const float (&values)[kLanes]) {
    auto* pairs = reinterpret_cast<typename PairOf<T>::type*>(&bits);
#pragma unroll
    for (int i = 0; i < kLanes / 2; ++i) pair_from_float(values[2 * i], values[2 * i + 1], pairs[i]);
  }
};

// Splits a row of any width and address: `head` elements up to the first 16-byte boundary, whole vectors, and a rest
// shorter than a vector. The elements of head and rest are numbered consecutively.
template <class T>
struct RowSplit {
  int head, vectors, edges, width;

  __device__ RowSplit(const T* row, int width_) : width(width_) {
    const int before = static_cast<int>((16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(T));
    head = before < width ? before : width;
    vectors = (width - head) / Vector<T>::kLanes;
    edges = width - vectors * Vector<T>::kLanes;
  }
  // The column of an edge element.
  __device__ int column(int edge) const { return edge < head ? edge : edge + vectors * Vector<T>::kLanes; }
  // The vector that holds a column; none (-1, or `vectors`) if it lies at an edge.
  __device__ int vector_of(int column) const { return column < head ? -1 : (column - head) / Vector<T>::kLanes; }
  __device__ const uint4* at(const T* row) const { return reinterpret_cast<const uint4*>(row + head); }
  __device__ uint4* at(T* row) const { return reinterpret_cast<uint4*>(row + head); }
};

}  // namespace fastenc::cuda
