// Runs CUDA source compiled as plain C++: every thread is a fiber, every block an operating-system thread, so that
// __shared__ variables are thread-local ones and a cluster's blocks run side by side. Warps advance in random order, so
// that a missing barrier shows. Only what csrc/cuda uses is here.
#pragma once
#include <ucontext.h>

#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1) : x(x_) {}
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline void __stcs(uint4* place, uint4 value) {
  if (reinterpret_cast<uintptr_t>(place) % 16) std::fputs("misaligned vector store\n", stderr), std::abort();
  *place = value;
}

namespace emulation {

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated CUDA: %s\n", what);
  std::abort();
}

enum class Wait { none, warp, block, cluster, done };

struct Fiber {
  ucontext_t context;
  unsigned index;
  Wait wait = Wait::none;
  int shuffles = 0;
};

struct Block;
struct Cluster {
  std::vector<Block*> blocks;
  std::unique_ptr<std::barrier<>> barrier;
};

struct Block {
  Cluster* cluster;
  unsigned index, rank, threads;
  char* shared_anchor = nullptr;
  std::vector<Fiber> fibers;
  std::vector<uint32_t> exchanged;  // two slots a thread, used in turns
  ucontext_t scheduler;
  Fiber* running = nullptr;
  std::function<void()> body;
};

inline thread_local Block* block = nullptr;
inline thread_local char shared_anchor;

inline void wait(Wait kind) {
  Fiber* self = block->running;
  self->wait = kind;
  swapcontext(&self->context, &block->scheduler);
}

inline void fiber_main() {
  block->body();
  block->running->wait = Wait::done;
  swapcontext(&block->running->context, &block->scheduler);
}

// Lets the threads of a group go on once all of them wait for the same barrier; ended threads are not waited for.
inline bool release(Fiber* first, unsigned count, Wait kind) {
  unsigned waiting = 0, done = 0;
  for (unsigned i = 0; i < count; ++i) {
    waiting += first[i].wait == kind;
    done += first[i].wait == Wait::done;
  }
  if (!waiting || waiting + done < count) return false;
  if (kind == Wait::warp && done) fail("a shuffle with lanes that have ended");
  if (kind == Wait::cluster) block->cluster->barrier->arrive_and_wait();
  for (unsigned i = 0; i < count; ++i)
    if (first[i].wait == kind) first[i].wait = Wait::none;
  return true;
}

inline void run(Block& self) {
  constexpr size_t stack = 32768;
  block = &self;
  self.shared_anchor = &shared_anchor;
  self.cluster->barrier->arrive_and_wait();  // every block's anchor is known
  self.fibers = std::vector<Fiber>(self.threads);
  std::unique_ptr<char[]> stacks(new char[stack * self.threads]);
  self.exchanged.assign(2 * self.threads, 0);
  for (unsigned i = 0; i < self.threads; ++i) {
    Fiber& fiber = self.fibers[i];
    fiber.index = i;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks.get() + stack * i;
    fiber.context.uc_stack.ss_size = stack;
    makecontext(&fiber.context, fiber_main, 0);
  }
  std::minstd_rand random(self.index + 1);
  for (;;) {
    bool progress = false, left = false, skipped = false;
    const unsigned warps = self.threads / 32, first = random() % warps;
    for (unsigned w = 0; w < warps; ++w) {
      if (random() % 2) {
        skipped = true;
        continue;
      }
      Fiber* lanes = &self.fibers[(first + w) % warps * 32];
      for (unsigned lane = 0; lane < 32; ++lane) {
        if (lanes[lane].wait != Wait::none) continue;
        self.running = &lanes[lane];
        swapcontext(&self.scheduler, &lanes[lane].context);
        progress = true;
      }
      progress |= release(lanes, 32, Wait::warp);
    }
    for (Wait kind : {Wait::block, Wait::cluster}) progress |= release(self.fibers.data(), self.threads, kind);
    for (const Fiber& fiber : self.fibers) left |= fiber.wait != Wait::done;
    if (!left) break;
    if (!progress && !skipped) fail("deadlock: threads wait at different barriers");
  }
  self.cluster->barrier->arrive_and_drop();
}

inline unsigned architecture = 90;
inline unsigned threads_of_last_launch = 0;

// ex2.approx: a relative error of 2^-22 at worst, results below the normal range are 0.
inline float approximate_exp2(float x) {
  const float exact = std::exp2(x);
  if (std::fabs(exact) < 1.17549435e-38f) return 0.f;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x == 0.f || !std::isfinite(exact)) return exact;
  return exact * (bits * 2654435761u >> 31 ? 1.f + 0x1p-22f : 1.f - 0x1p-22f);
}

}  // namespace emulation

#define exp2f(x) ::emulation::approximate_exp2(x)

// threadIdx.x and the like: read from the running fiber.
template <unsigned (*read)()>
struct EmulatedIndex {
  struct {
    operator unsigned() const { return read(); }
  } x;
};
inline const EmulatedIndex<[] { return emulation::block->running->index; }> threadIdx;
inline const EmulatedIndex<[] { return emulation::block->index; }> blockIdx;
inline const EmulatedIndex<[] { return emulation::block->threads; }> blockDim;

inline void __syncthreads() { emulation::wait(emulation::Wait::block); }

inline float __shfl_xor_sync(unsigned, float value, int lanes) {
  auto* self = emulation::block->running;
  uint32_t* slots = emulation::block->exchanged.data() + (self->shuffles++ % 2) * emulation::block->threads;
  std::memcpy(slots + self->index, &value, sizeof value);
  emulation::wait(emulation::Wait::warp);
  std::memcpy(&value, slots + (self->index ^ lanes), sizeof value);
  return value;
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};
struct cudaFuncAttributes {
  int ptxVersion;
};

template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
  attributes->ptxVersion = emulation::architecture;
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(
    const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  const unsigned size = config->numAttrs ? config->attrs->val.clusterDim.x : 1;
  if (config->blockDim.x % 32 || config->blockDim.x > 1024 || config->gridDim.x % size)
    emulation::fail("a launch that no GPU takes");
  if (size > 1 && emulation::architecture < 90) emulation::fail("a cluster on a GPU without clusters");
  emulation::threads_of_last_launch = config->blockDim.x;
  for (unsigned begin = 0; begin < config->gridDim.x; begin += size) {
    emulation::Cluster cluster;
    cluster.barrier = std::make_unique<std::barrier<>>(size);
    std::vector<emulation::Block> blocks(size);
    std::vector<std::thread> threads;
    for (unsigned rank = 0; rank < size; ++rank) {
      emulation::Block& block = blocks[rank];
      block.cluster = &cluster;
      block.index = begin + rank;
      block.rank = rank;
      block.threads = config->blockDim.x;
      block.body = [=] { kernel(arguments...); };
      cluster.blocks.push_back(&block);
    }
    for (auto& block : blocks) threads.emplace_back([&block] { emulation::run(block); });
    for (auto& thread : threads) thread.join();
  }
  return cudaSuccess;
}
