#include "attention.h"

#include <atomic>
#include <memory>
#include <numeric>

#include "tensors.h"

namespace fastenc {

// For the widest vectors and panels; the kernels lay it out.
int64_t attention_forward_scratch(int64_t length, int64_t head_dim) {
  const int64_t padded = (length + 127) / 128 * 128, rows = kAttentionRows;
  return 2 * padded * head_dim + rows * (padded + 16) + 2 * rows * head_dim + padded;
}

int64_t attention_backward_scratch(int64_t length, int64_t head_dim) {
  const int64_t padded = (length + 127) / 128 * 128, rows = kAttentionRows;
  return 5 * padded * head_dim + 3 * rows * (padded + 16) + 3 * rows * head_dim;
}

namespace {

// Scratch that a thread keeps from call to call: fresh pages would cost more than the arithmetic on them. It starts
// on a cache line, as the kernels' whole vectors do: a load across two lines costs two.
float* thread_scratch(int64_t floats) {
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

// Calls task(first, length, head) for every head of every sequence; threads take the longest first. Python checks
// the offsets for the user's eyes; the checks here keep a direct call inside the buffers.
template <class Task>
void for_each_task(const Tensor& cu_seqlens, int64_t tokens, int64_t max_seqlen, int64_t num_heads, const Task& task) {
  STD_TORCH_CHECK(cu_seqlens.scalar_type() == ScalarType::Int, "attention: cu_seqlens must be int32");
  const auto* offsets = static_cast<const int32_t*>(cu_seqlens.const_data_ptr());
  const int64_t sequences = cu_seqlens.numel() - 1;
  STD_TORCH_CHECK(
      sequences >= 0 && offsets[0] == 0 && offsets[sequences] == tokens,
      "attention: cu_seqlens must run from 0 to the number of tokens");
  for (int64_t s = 0; s < sequences; ++s)
    STD_TORCH_CHECK(
        offsets[s] <= offsets[s + 1] && offsets[s + 1] - offsets[s] <= max_seqlen,
        "attention: cu_seqlens must not decrease, nor a sequence be longer than max_seqlen");
  std::vector<int32_t> order(sequences);
  std::iota(order.begin(), order.end(), 0);
  const auto length = [&](int32_t s) { return offsets[s + 1] - offsets[s]; };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return length(a) > length(b); });
  const int64_t tasks = sequences * num_heads;
  if (!tasks) return;
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(tasks, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
      const int32_t sequence = order[i / num_heads];
      if (length(sequence) > 0) task(int64_t{offsets[sequence]}, int64_t{length(sequence)}, i % num_heads);
    }
  });
}

Attention arguments(const Tensor& qkv, const std::optional<Tensor>& seed, double dropout_p, double scale) {
  Attention a{};
  a.qkv = qkv.const_data_ptr();
  a.stride_token = qkv.stride(0);
  a.stride_part = qkv.stride(1);
  a.stride_head = qkv.stride(2);
  a.num_heads = qkv.size(2);
  a.head_dim = qkv.size(3);
  a.scale = static_cast<float>(scale);
  a.dropout = make_dropout(dropout_p, seed);
  return a;
}

// (out, no log-sum-exp: the backward here forms the probabilities from qkv alone)
std::tuple<Tensor, Tensor> forward(
    Tensor qkv, Tensor cu_seqlens, int64_t max_seqlen, std::optional<Tensor> seed, double dropout_p, double scale) {
  const bool bf16 = is_bfloat16(qkv);
  if (qkv.stride(3) != 1) qkv = as_contiguous(qkv);
  cu_seqlens = as_contiguous(cu_seqlens);
  Attention a = arguments(qkv, seed, dropout_p, scale);
  Tensor out = empty({qkv.size(0), a.num_heads, a.head_dim}, qkv.scalar_type());
  a.out = out.mutable_data_ptr();
  for_each_task(cu_seqlens, qkv.size(0), max_seqlen, a.num_heads, [&](int64_t first, int64_t length, int64_t head) {
    float* scratch = thread_scratch(attention_forward_scratch(max_seqlen, a.head_dim));
    FASTENC_CALL(attention_forward, a, bf16, first, length, head, scratch);
  });
  return {out, empty({0}, ScalarType::Float)};
}

Tensor backward(
    Tensor dout, Tensor qkv, std::optional<Tensor> /*out*/, Tensor /*lse*/, Tensor cu_seqlens, int64_t max_seqlen,
    std::optional<Tensor> seed, double dropout_p, double scale) {
  const bool bf16 = is_bfloat16(qkv);
  if (qkv.stride(3) != 1) qkv = as_contiguous(qkv);
  cu_seqlens = as_contiguous(cu_seqlens);
  dout = as_contiguous(dout);
  Attention a = arguments(qkv, seed, dropout_p, scale);
  a.dout = dout.const_data_ptr();
  Tensor dqkv = empty({qkv.size(0), 3, a.num_heads, a.head_dim}, qkv.scalar_type());
  a.dqkv = dqkv.mutable_data_ptr();
  for_each_task(cu_seqlens, qkv.size(0), max_seqlen, a.num_heads, [&](int64_t first, int64_t length, int64_t head) {
    float* scratch = thread_scratch(attention_backward_scratch(max_seqlen, a.head_dim));
    FASTENC_CALL(attention_backward, a, bf16, first, length, head, scratch);
  });
  return dqkv;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("attention_fwd", TORCH_BOX(&forward));
  m.impl("attention_bwd", TORCH_BOX(&backward));
}

}  // namespace fastenc
