// Scratch memory that a thread keeps from call to call: fresh pages would cost more than the arithmetic on them. It
// starts on a cache line, because a vector load across two lines costs two loads.
#pragma once
#include <cstdint>
#include <memory>
#include <new>

namespace fastenc {

// What a buffer is for. Buffers of one thread that are in use at the same time must have different purposes.
enum class Scratch { rows, weights, operands, tiles, layer, count };

inline float* thread_scratch(int64_t floats, Scratch purpose = Scratch::rows) {
  constexpr int64_t line = 64;
  struct Buffer {
    std::unique_ptr<char[]> data;
    int64_t size = 0;
  };
  thread_local Buffer buffers[static_cast<int>(Scratch::count)];
  Buffer& buffer = buffers[static_cast<int>(purpose)];
  const int64_t bytes = floats * sizeof(float) + line;
  if (buffer.size < bytes) {
    buffer.data.reset();  // frees the old memory before the new is allocated
    buffer.data.reset(new (std::nothrow) char[bytes]);
    buffer.size = buffer.data ? bytes : 0;
    // Thrown by hand: before a `new` that can throw, g++ 16 left out `buffer.size = 0`.
    if (!buffer.data) throw std::bad_alloc();
  }
  const auto start = reinterpret_cast<uintptr_t>(buffer.data.get());
  return reinterpret_cast<float*>((start + line - 1) / line * line);
}

}  // namespace fastenc
