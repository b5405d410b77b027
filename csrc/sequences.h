// The sequences of a packed batch: their offsets, and their division among workers.
#pragma once
#include <atomic>

#include "tensors.h"

namespace fastenc {

// Offsets on the host. Python checks them for users; these checks keep direct calls of the op inside the buffers. op:
// the op's name, for errors.
inline const int32_t* checked_offsets(
    const char* op, const Tensor& cu_seqlens, int64_t tokens, int64_t max_seqlen) {
  STD_TORCH_CHECK(cu_seqlens.scalar_type() == ScalarType::Int, op, ": cu_seqlens must be int32");
  const auto* offsets = static_cast<const int32_t*>(cu_seqlens.const_data_ptr());
  const int64_t sequences = cu_seqlens.numel() - 1;
  STD_TORCH_CHECK(
      sequences >= 0 && offsets[0] == 0 && offsets[sequences] == tokens,
      op, ": cu_seqlens must run from 0 to the number of tokens ", tokens);
  for (int64_t s = 0; s < sequences; ++s)
    STD_TORCH_CHECK(
        offsets[s] <= offsets[s + 1] && offsets[s + 1] - offsets[s] <= max_seqlen,
        op, ": cu_seqlens must not decrease, nor a sequence be longer than max_seqlen ", max_seqlen, ", got ",
        offsets[s], " then ", offsets[s + 1], " at index ", s + 1);
  return offsets;
}

// A contiguous table (positions, rotary_dim), as rotary.h says.
inline Tensor checked_rotary_table(const char* op, const Tensor& table, int64_t max_seqlen, int64_t head_dim) {
  STD_TORCH_CHECK(
      table.scalar_type() == ScalarType::Float && table.dim() == 2 && table.size(0) >= max_seqlen &&
          table.size(1) % 2 == 0 && table.size(1) <= head_dim,
      op, ": the rotary table must be float32 (positions, rotary_dim), at least max_seqlen rows, rotary_dim even");
  return as_contiguous(table);
}

// Worker i gets the sequences [bounds[i], bounds[i + 1]): in order, and nearly the same number of tokens for each
// worker.
inline std::vector<int64_t> share_sequences(const int32_t* offsets, int64_t sequences, int64_t workers) {
  std::vector<int64_t> bounds{0};
  for (int64_t worker = 1, sequence = 0; worker < workers; ++worker) {
    const int64_t tokens = offsets[sequences] * worker / workers;
    while (sequence < sequences && int64_t{offsets[sequence]} + offsets[sequence + 1] <= 2 * tokens) ++sequence;
    bounds.push_back(sequence);
  }
  bounds.push_back(sequences);
  return bounds;
}

// Calls run(sequence, head) for every head of every sequence. Each worker begins with its share of the tokens, in their
// order: the matrix products before and after share out rows in the same way and leave them in its cache. Then it helps
// the others.
template <class Run>
void for_each_head(const int32_t* offsets, int64_t sequences, int64_t num_heads, const Run& run) {
  const int64_t tasks = sequences * num_heads;
  if (!tasks) return;
  const int64_t workers = std::min<int64_t>(tasks, torch::stable::get_num_threads());
  const auto bounds = share_sequences(offsets, sequences, workers);
  std::vector<std::atomic<int64_t>> next(workers);
  for (int64_t worker = 0; worker < workers; ++worker) next[worker] = bounds[worker] * num_heads;
  torch::stable::parallel_for(0, workers, 1, [&](int64_t first, int64_t last) {
    for (int64_t worker = first; worker < last; ++worker)
      for (int64_t turn = 0; turn < workers; ++turn) {
        const int64_t share = (worker + turn) % workers;
        for (int64_t i; (i = next[share].fetch_add(1)) < bounds[share + 1] * num_heads;)
          run(i / num_heads, i % num_heads);
      }
  });
}

}  // namespace fastenc
