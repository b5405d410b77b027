// A row is read once and its gradient written once. One block holds up to 32,768 columns (16,384 in float32) in
// registers between the two passes; a cluster of up to 8 blocks, which exchange their sums through distributed shared
// memory, holds 262,144. If a row is longer, or too long for a GPU without clusters, a block keeps the last tile and
// reads the others again.
#include <cooperative_groups.h>

#include <climits>
#include <cmath>

#include "../masked_cross_entropy_arguments.h"
#include "launch.h"
#include "vector.cuh"

namespace fastenc::cuda {
namespace {

constexpr int kHeldVectors = 8;  // per thread: 32 registers
constexpr int kMaxCluster = 8;   // the most that every GPU with clusters can form
constexpr int kMinThreads = 128, kScaleThreads = 256;

// At 64 registers a thread two blocks of 512 fit on a multiprocessor, so that one loads while the other stores.
constexpr int kThreads = 512;
// The longest float32 rows, and those of a GPU without clusters, take blocks of twice as many: 32,768 columns a block.
template <class T>
constexpr int kMaxThreads = sizeof(T) == 2 ? kThreads : 2 * kThreads;

// exp(x - row_max). While row_max is -infinity, 0 takes its place: inf - inf would be NaN.
__device__ float exp_below(float x, float row_max) {
  return fast_exp2((x - (row_max == -INFINITY ? 0.f : row_max)) * 1.442695041f);
}

// Partial statistics of a row: the largest logit, the sum of exp(logit - row_max), the sum of the logits.
struct Sums {
  float row_max = -INFINITY, row_sum = 0.f, logit_sum = 0.f;
};

// The sums of all 32 lanes, in each of them.
__device__ Sums merge_warp(const Sums& local) {
  Sums all = local;
  for (int distance = 16; distance; distance >>= 1)
    all.row_max = fmaxf(all.row_max, __shfl_xor_sync(0xffffffff, all.row_max, distance));
  all.row_sum *= exp_below(local.row_max, all.row_max);
  for (int distance = 16; distance; distance >>= 1) {
    all.row_sum += __shfl_xor_sync(0xffffffff, all.row_sum, distance);
    all.logit_sum += __shfl_xor_sync(0xffffffff, all.logit_sum, distance);
  }
  return all;
}

// The sums of the whole block, in each of its threads.
__device__ Sums merge_block(const Sums& local) {
  __shared__ float maxima[32], sums_of_exp[32], logit_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Sums sums = merge_warp(local);
  if (lane == 0) {
    maxima[warp] = sums.row_max;
    sums_of_exp[warp] = sums.row_sum;
    logit_sums[warp] = sums.logit_sum;
  }
  __syncthreads();
  sums = Sums{};
  if (lane < blockDim.x / 32) sums = Sums{maxima[lane], sums_of_exp[lane], logit_sums[lane]};
  return merge_warp(sums);
}

// The sums of the cluster's blocks, in each of their threads.
__device__ Sums merge_cluster(const Sums& local) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ float shared[3];
  auto cluster = cooperative_groups::this_cluster();
  if (threadIdx.x == 0) {
    shared[0] = local.row_max;
    shared[1] = local.row_sum;
    shared[2] = local.logit_sum;
  }
  cluster.sync();
  const int lane = threadIdx.x % 32;
  Sums sums;
  if (lane < cluster.num_blocks()) {
    const float* theirs = cluster.map_shared_rank(shared, lane);
    sums = Sums{theirs[0], theirs[1], theirs[2]};
  }
  cluster.sync();  // no block may end while others read its shared memory
  return merge_warp(sums);
#else
  return local;  // launched without clusters
#endif
}

// The part of a row that a block holds in registers: up to kHeldVectors vectors a thread, from vector `begin` on.
template <class T>
struct Tile {
  static constexpr int kLanes = Vector<T>::kLanes;
  Vector<T> held[kHeldVectors];

  __device__ void load(const uint4* vectors, int begin, int end) {
#pragma unroll
    for (int k = 0; k < kHeldVectors; ++k) {
      const int i = begin + k * blockDim.x + threadIdx.x;
      if (i < end) held[k].bits = vectors[i];
    }
  }

  __device__ void add_to(Sums& sums, int begin, int end) const {
    float before = sums.row_max, values[kLanes];
#pragma unroll
    for (int k = 0; k < kHeldVectors; ++k) {
      if (begin + k * blockDim.x + threadIdx.x >= end) continue;
      held[k].unpack(values);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) sums.row_max = fmaxf(sums.row_max, values[lane]);
    }
    sums.row_sum *= exp_below(before, sums.row_max);
#pragma unroll
    for (int k = 0; k < kHeldVectors; ++k) {
      if (begin + k * blockDim.x + threadIdx.x >= end) continue;
      held[k].unpack(values);
      float row_sum = 0.f, logit_sum = 0.f;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        row_sum += exp_below(values[lane], sums.row_max);
        logit_sum += values[lane];
      }
      sums.row_sum += row_sum;
      sums.logit_sum += logit_sum;
    }
  }

  // Writes the gradient. The thread that writes the label's vector corrects the label's element.
  __device__ void store(
      uint4* vectors, int begin, int end, float row_max, const RowTerms& terms, int label_vector, T* at_label) const {
#pragma unroll
    for (int k = 0; k < kHeldVectors; ++k) {
      const int i = begin + k * blockDim.x + threadIdx.x;
      if (i >= end) continue;
      float values[kLanes];
      held[k].unpack(values);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane)
        values[lane] = exp_below(values[lane], row_max) * terms.factor - terms.everywhere;
      Vector<T> gradient;
      gradient.pack(values);
      __stcs(vectors + i, gradient.bits);
      if (i == label_vector) from_float(terms.at_label, *at_label);
    }
  }
};

// `blocks_per_row` consecutive blocks compute a row; two or more form a cluster.
template <class T>
__global__ void __launch_bounds__(kMaxThreads<T>, 2 * kThreads / kMaxThreads<T>)
    masked_cross_entropy(MaskedCrossEntropy a, int blocks_per_row) {
  const int64_t row = blockIdx.x / blocks_per_row;
  const int rank = blockIdx.x % blocks_per_row;
  const int64_t label = a.labels[row];
  const T* x = static_cast<const T*>(a.logits) + row * a.row_stride;
  T* dx = a.dlogits ? static_cast<T*>(a.dlogits) + row * a.row_stride : nullptr;
  const RowSplit<T> split(x, static_cast<int>(a.vocabulary));
  const int share = (split.vectors + blocks_per_row - 1) / blocks_per_row;
  const int begin = min(rank * share, split.vectors), end = min(begin + share, split.vectors);
  const int edge = rank == 0 && threadIdx.x < split.edges ? split.column(threadIdx.x) : -1;

  if (label == a.ignore_index) {
    if (rank == 0 && threadIdx.x == 0) a.losses[row] = 0.f;
    if (!dx) return;
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) __stcs(split.at(dx) + i, make_uint4(0, 0, 0, 0));
    if (edge >= 0) from_float(0.f, dx[edge]);
    return;
  }

  // Read x before the sums are merged: after that, other threads and blocks may overwrite it.
  const bool valid = label >= 0 && label < a.vocabulary;
  const float at_label = valid ? to_float(x[label]) : NAN;
  const float scale = !valid ? NAN : a.divisor ? 1.f / static_cast<float>(*a.divisor) : 1.f;
  const int tile_vectors = kHeldVectors * blockDim.x;
  Sums sums;
  float edge_value = 0.f;
  if (edge >= 0) {
    edge_value = to_float(x[edge]);
    sums = Sums{edge_value, exp_below(edge_value, edge_value), edge_value};
  }
  Tile<T> tile;
  int position = begin;
  tile.load(split.at(x), position, end);
  tile.add_to(sums, position, end);
  while (position + tile_vectors < end) {
    position += tile_vectors;
    tile.load(split.at(x), position, end);
    tile.add_to(sums, position, end);
  }
  sums = merge_block(sums);
  if (blocks_per_row > 1) sums = merge_cluster(sums);

  SoftmaxStatistics statistics;
  statistics.row_max = sums.row_max;
  statistics.log_row_sum = logf(sums.row_sum);
  statistics.inverse = 1.f / sums.row_sum;
  statistics.mean = sums.logit_sum / static_cast<float>(a.vocabulary);
  statistics.target = at_label - sums.row_max;
  statistics.target_exp = exp_below(at_label, sums.row_max);
  const RowTerms terms = row_terms(a, statistics, scale);
  if (rank == 0 && threadIdx.x == 0) a.losses[row] = terms.loss;
  if (!dx) return;

  const int label_vector = valid ? split.vector_of(static_cast<int>(label)) : -1;
  if (edge >= 0)
    from_float(
        edge == label ? terms.at_label : exp_below(edge_value, sums.row_max) * terms.factor - terms.everywhere, dx[edge]);
  // The last tile is still in registers. The others are read again, the latest first.
  tile.store(split.at(dx), position, end, sums.row_max, terms, label_vector, dx + label);
  while (position > begin) {
    position -= tile_vectors;
    tile.load(split.at(x), position, end);
    tile.store(split.at(dx), position, end, sums.row_max, terms, label_vector, dx + label);
  }
}

// Multiplies labelled rows by factors[row], or by factors[0] if `one`. A factor of 1 reads nothing.
template <class T>
__global__ void __launch_bounds__(kScaleThreads)
    scale_rows(T* x, int64_t width, const int64_t* labels, int64_t ignore_index, const float* factors, bool one) {
  constexpr int kLanes = Vector<T>::kLanes;
  const int64_t row = blockIdx.x;
  const float factor = factors[one ? 0 : row];
  if (labels[row] == ignore_index || factor == 1.f) return;
  x += row * width;
  const RowSplit<T> split(x, static_cast<int>(width));
  for (int i = threadIdx.x; i < split.vectors; i += blockDim.x) {
    Vector<T> vector{split.at(x)[i]};
    float values[kLanes];
    vector.unpack(values);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) values[lane] *= factor;
    vector.pack(values);
    __stcs(split.at(x) + i, vector.bits);
  }
  if (threadIdx.x < split.edges) {
    T& value = x[split.column(threadIdx.x)];
    from_float(to_float(value) * factor, value);
  }
}

// Calls run(T{}) for the tensor's element type.
template <class Run>
void for_dtype(const Tensor& x, const Run& run) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return run(float{});
    case ScalarType::Half:
      return run(__half{});
    case ScalarType::BFloat16:
      return run(__nv_bfloat16{});
    default:
      STD_TORCH_CHECK(false, "fastenc: CUDA kernels take float32, float16 or bfloat16");
  }
}

void check_size(const Tensor& x) {
  STD_TORCH_CHECK(
      x.size(0) <= INT_MAX / kMaxCluster && x.size(1) <= INT_MAX - 16,
      "masked_cross_entropy: more rows or columns than a grid can have");
}

void run(const Tensor& logits, const MaskedCrossEntropy& a) {
  const int64_t rows = logits.size(0);
  check_size(logits);
  if (rows == 0 || a.vocabulary == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  for_dtype(logits, [&](auto element) {
    using T = decltype(element);
    const auto kernel = &masked_cross_entropy<T>;
    const int64_t vectors = a.vocabulary / Vector<T>::kLanes;
    const auto held = [](int threads) { return int64_t{threads} * kHeldVectors; };
    int cluster = 1, most = kThreads;
    if (vectors > held(most) && has_clusters(kernel))
      while (cluster < kMaxCluster && vectors > cluster * held(most)) cluster *= 2;
    if (vectors > cluster * held(most)) most = kMaxThreads<T>;
    const int64_t each = (vectors + cluster * kHeldVectors - 1) / (cluster * kHeldVectors);
    const int threads = static_cast<int>(std::clamp<int64_t>((each + 31) / 32 * 32, kMinThreads, most));
    launch(logits, kernel, rows * cluster, threads, cluster, a, cluster);
  });
}

Tensor empty_losses(const Tensor& logits) {
  return torch::stable::new_empty(logits, {logits.size(0)}, ScalarType::Float);
}

// (losses, dlogits): float32 losses, 0 in ignored rows; dlogits is empty unless wanted.
std::tuple<Tensor, Tensor> forward(
    Tensor logits, Tensor labels, int64_t ignore_index, double label_smoothing, double z_loss,
    std::optional<Tensor> divisor, bool wants_gradient) {
  if (wants_gradient || !has_contiguous_rows(logits)) logits = as_contiguous(logits);
  // A new gradient is aligned to 16 bytes. Its rows are split like those of the logits, so these must be aligned too.
  if (wants_gradient && reinterpret_cast<uintptr_t>(logits.const_data_ptr()) % 16)
    logits = torch::stable::clone(logits);
  labels = as_contiguous(labels);
  Tensor losses = empty_losses(logits);
  Tensor dlogits = wants_gradient ? torch::stable::empty_like(logits) : torch::stable::new_empty(logits, {0});
  run(logits, make_arguments(logits, labels, ignore_index, label_smoothing, z_loss, divisor, losses,
                             wants_gradient ? dlogits.mutable_data_ptr() : nullptr));
  return {losses, dlogits};
}

// Overwrites the logits with their gradient; returns the losses.
Tensor forward_in_place(
    Tensor logits, Tensor labels, int64_t ignore_index, double label_smoothing, double z_loss,
    std::optional<Tensor> divisor) {
  check_in_place(logits);
  labels = as_contiguous(labels);
  Tensor losses = empty_losses(logits);
  run(logits, make_arguments(logits, labels, ignore_index, label_smoothing, z_loss, divisor, losses,
                             logits.mutable_data_ptr()));
  return losses;
}

void scale_labelled_rows(Tensor x, Tensor labels, int64_t ignore_index, Tensor factors) {
  labels = as_contiguous(labels);
  factors = as_contiguous(factors);
  check_labels(labels, x.size(0));
  check_size(x);
  STD_TORCH_CHECK(
      x.is_contiguous() && factors.scalar_type() == ScalarType::Float &&
          (factors.numel() == 1 || factors.numel() == x.size(0)),
      "scale_labelled_rows_: x must be contiguous, factors float32, one or one a row");
  if (x.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  for_dtype(x, [&](auto element) {
    using T = decltype(element);
    launch(x, &scale_rows<T>, x.size(0), kScaleThreads, 1, static_cast<T*>(x.mutable_data_ptr()), x.size(1),
           static_cast<const int64_t*>(labels.const_data_ptr()), ignore_index,
           static_cast<const float*>(factors.const_data_ptr()), factors.numel() == 1);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CUDA, m) {
  m.impl("masked_cross_entropy_fwd", TORCH_BOX(&forward));
  m.impl("masked_cross_entropy_", TORCH_BOX(&forward_in_place));
  m.impl("scale_labelled_rows_", TORCH_BOX(&scale_labelled_rows));
}

}  // namespace fastenc::cuda
