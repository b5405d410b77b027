// A number that changes when the contents of some buffers do, from a sample of them: cheap enough to be taken at
// every call. Optimisers change every element; a change that misses every sample goes unseen.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace fastenc {

inline uint64_t fingerprint(const std::vector<std::pair<uintptr_t, size_t>>& buffers) {
  constexpr size_t kSamples = 64;
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a's constants
  for (const auto& [address, bytes] : buffers) {
    const auto* data = reinterpret_cast<const char*>(address);
    const size_t words = bytes / sizeof(uint64_t), step = words > kSamples ? words / kSamples : 1;
    for (size_t i = 0; i < words; i += step) {
      uint64_t word;
      std::memcpy(&word, data + i * sizeof word, sizeof word);
      hash = (hash ^ word) * 0x100000001b3u;
      hash ^= hash >> 29;
    }
  }
  return hash;
}

}  // namespace fastenc
