// Scratch that a thread keeps from call to call: fresh pages would cost more than the arithmetic on them. It starts
// on a cache line, as the kernels' whole vectors do: a load across two lines costs two.
#pragma once
#include <cstdint>
#include <memory>

namespace fastenc {

inline float* thread_scratch(int64_t floats) {
  constexpr int64_t line = 64;
  thread_local std::unique_ptr<char[]> buffer;
  thread_local int64_t size = 0;
  const int64_t bytes = floats * sizeof(float) + line;
  if (size < bytes) {
    buffer.reset(new char[bytes]);
    size = bytes;
  }
  const auto start = reinterpret_cast<uintptr_t>(buffer.get());
  return reinterpret_cast<float*>((start + line - 1) / line * line);
}

}  // namespace fastenc
