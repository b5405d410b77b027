#include "rotary.h"

#include "sequences.h"

namespace fastenc {
namespace {

Tensor rotate(Tensor x, Tensor table, Tensor cu_seqlens, int64_t max_seqlen, bool inverse) {
  if (x.stride(2) != 1) x = as_contiguous(x);
  table = checked_rotary_table("rotary", table, max_seqlen, x.size(2));
  cu_seqlens = as_contiguous(cu_seqlens);
  const int64_t tokens = x.size(0), sequences = cu_seqlens.numel() - 1;
  const auto* offsets = checked_offsets("rotary", cu_seqlens, tokens, max_seqlen);
  const bool bf16 = is_bfloat16(x);
  Tensor y = empty({tokens, x.size(1), x.size(2)}, x.scalar_type());
  const Rotary r{
      x.const_data_ptr(), y.mutable_data_ptr(), static_cast<const float*>(table.const_data_ptr()),
      x.stride(0),        x.stride(1),          x.size(1),
      x.size(2),          table.size(1),        inverse};
  torch::stable::parallel_for(0, tokens, grain(r.num_heads * r.head_dim), [&](int64_t begin, int64_t end) {
    int64_t s = std::upper_bound(offsets, offsets + sequences + 1, begin) - offsets - 1;
    for (int64_t token = begin; token < end; ++s) {
      const int64_t stop = std::min<int64_t>(end, offsets[s + 1]);
      FASTENC_CALL(rotary, r, bf16, token, stop, token - offsets[s]);
      token = stop;
    }
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) { m.impl("rotary", TORCH_BOX(&rotate)); }

}  // namespace fastenc
