// Zeros that cost nothing until they are read or written.
#pragma once
#include <cstdlib>

#include "tensors.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fastenc {

enum class Pages { small, huge };

// Contiguous zeros (rows, columns) of x's shape and dtype. calloc takes large blocks, already zero, from the system,
// which maps only the pages that are touched. An allocator that is tuned to reuse memory clears it instead.
// huge: the system maps 2 MiB at a time where it can. That is right for a tensor that is read as a whole later; where
// most rows are never touched, small pages map less.
inline Tensor lazy_zeros_like(const Tensor& x, Pages pages) {
  constexpr size_t alignment = 64;
  const size_t bytes = x.numel() * x.element_size();
  void* block = std::calloc(bytes + alignment, 1);
  STD_TORCH_CHECK(block, "fastenc: no memory for a gradient of ", bytes, " bytes");
  void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(block) + alignment - 1) / alignment * alignment);
#if defined(__linux__)
  constexpr size_t page = 4096, own_mapping = size_t{32} << 20;  // glibc maps blocks of this size on their own
  if (pages == Pages::huge && bytes > own_mapping) {
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(aligned) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(aligned) + bytes) / page * page;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a wish: without it, pages stay small
  }
#endif
  const int64_t sizes[2] = {x.size(0), x.size(1)}, strides[2] = {x.size(1), 1};
  return torch::stable::from_blob(
      aligned, torch::headeronly::IntHeaderOnlyArrayRef(sizes, 2), torch::headeronly::IntHeaderOnlyArrayRef(strides, 2),
      x.device(), x.scalar_type(), [block](void*) { std::free(block); });
}

}  // namespace fastenc
