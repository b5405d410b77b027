#include "head_statistics.h"

#include "scratch.h"
#include "sequences.h"

namespace fastenc {

// Enough for the widest vectors and panels; the kernel divides it.
int64_t head_statistics_scratch(int64_t length, int64_t head_dim) {
  const int64_t padded = (length + 127) / 128 * 128;
  const int64_t bias = 3 * length + 512;
  return padded * head_dim + kAttentionRows * (padded + 16) + kAttentionRows * head_dim + bias;
}

namespace {

Tensor rows_contiguous(const Tensor& x) { return x.stride(2) == 1 ? x : as_contiguous(x); }

std::tuple<Tensor, Tensor> head_statistics(
    Tensor q, Tensor k, Tensor cu_seqlens, std::optional<Tensor> targets, std::optional<Tensor> relative_bias,
    int64_t max_seqlen, double scale, int64_t window_left, int64_t window_right, bool skip_ends) {
  STD_TORCH_CHECK(
      q.dim() == 3 && k.scalar_type() == q.scalar_type() && k.size(0) == q.size(0) && k.size(1) == q.size(1) &&
          k.size(2) == q.size(2) && q.size(2) % 16 == 0,
      "head_statistics: q and k must agree in dtype and shape, head_dim be a multiple of 16");
  q = rows_contiguous(q);
  k = rows_contiguous(k);
  cu_seqlens = as_contiguous(cu_seqlens);
  const bool bf16 = is_bfloat16(q);
  const int64_t tokens = q.size(0), heads = q.size(1), sequences = cu_seqlens.numel() - 1;
  const auto* offsets = checked_offsets("head_statistics", cu_seqlens, tokens, max_seqlen);
  Tensor statistics = empty({tokens, heads, kHeadStatistics}, ScalarType::Float);
  Tensor strongest = empty({tokens, heads}, ScalarType::Int);
  STD_TORCH_CHECK(
      !relative_bias ||
          (relative_bias->dim() == 2 && relative_bias->size(0) == heads && relative_bias->size(1) % 2 == 1),
      "head_statistics: relative_bias must be (num_heads, 2 * R + 1)");
  const FloatVector table(relative_bias);
  HeadStatistics h{};
  h.attention.q = {q.const_data_ptr(), q.stride(0), q.stride(1)};
  h.attention.k = {k.const_data_ptr(), k.stride(0), k.stride(1)};
  h.attention.num_heads = heads;
  h.attention.head_dim = q.size(2);
  h.attention.scale = static_cast<float>(scale);
  h.attention.window_left = std::min(window_left, tokens);
  h.attention.window_right = std::min(window_right, tokens);
  h.attention.relative_bias = table.data();
  h.attention.relative_radius = relative_bias ? relative_bias->size(1) / 2 : 0;
  h.skip_ends = skip_ends;
  if (targets) {
    STD_TORCH_CHECK(
        targets->scalar_type() == ScalarType::Int && targets->numel() == tokens,
        "head_statistics: targets must be int32, one for each token");
    targets = as_contiguous(*targets);
    h.targets = static_cast<const int32_t*>(targets->const_data_ptr());
  }
  h.statistics = static_cast<float*>(statistics.mutable_data_ptr());
  h.strongest = static_cast<int32_t*>(strongest.mutable_data_ptr());
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(sequences, 4 * torch::stable::get_num_threads()));
  const auto bounds = share_sequences(offsets, sequences, workers);
  torch::stable::parallel_for(0, workers * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task)
      for (int64_t s = bounds[task / heads]; s < bounds[task / heads + 1]; ++s) {
        const int64_t length = offsets[s + 1] - offsets[s];
        if (!length) continue;
        float* scratch = thread_scratch(head_statistics_scratch(length, h.attention.head_dim));
        FASTENC_CALL(head_statistics, h, bf16, offsets[s], length, task % heads, scratch);
      }
  });
  return {statistics, strongest};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) { m.impl("head_statistics", TORCH_BOX(&head_statistics)); }

}  // namespace fastenc
