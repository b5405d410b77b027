#pragma once
#include <cuda_runtime.h>

namespace cooperative_groups {

struct cluster_group {
  unsigned num_blocks() const { return emulation::block->cluster->blocks.size(); }
  void sync() const { emulation::wait(emulation::Wait::cluster); }
  // Thread-local variables lie at the same distance from one another in every thread.
  template <class T>
  T* map_shared_rank(T* own, unsigned rank) const {
    const auto distance = reinterpret_cast<char*>(own) - emulation::block->shared_anchor;
    return reinterpret_cast<T*>(emulation::block->cluster->blocks.at(rank)->shared_anchor + distance);
  }
};

inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups
