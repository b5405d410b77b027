#include "block_sparse_attention.h"

#include "packed_heads.h"
#include "scratch.h"
#include "sequences.h"

namespace fastenc {

namespace {

// Upper bounds for all instruction sets: the rows of a block in whole panels, and the floats of a row of scores.
int64_t widest_panels(int64_t block_size) { return (block_size + 63) / 64 * 64; }
int64_t widest_scores(int64_t block_size, int64_t entries) { return entries * ((block_size + 15) / 16 * 16) + 16; }

}  // namespace

int64_t block_sparse_forward_scratch(int64_t length, int64_t block_size, int64_t entries, int64_t head_dim) {
  const int64_t blocks = (length + block_size - 1) / block_size, rows = kAttentionRows;
  return (blocks * widest_panels(block_size) + length + 2 * rows) * head_dim +
         rows * widest_scores(block_size, entries);
}

int64_t block_sparse_backward_scratch(int64_t length, int64_t block_size, int64_t entries, int64_t head_dim) {
  const int64_t blocks = (length + block_size - 1) / block_size, rows = kAttentionRows;
  return (2 * blocks * widest_panels(block_size) + 3 * length + 3 * rows) * head_dim +
         2 * rows * widest_scores(block_size, entries);
}

namespace {

constexpr const char* kOp = "block_sparse_attention";

// What both directions are called with; it keeps alive what the tasks point to.
struct Call {
  Tensor q, k, v, starts, columns, counts, cu_seqlens;
  bool bf16;
  int64_t rows, plans, max_entries = 0;
  const int32_t* offsets;
  BlockSparseAttention attention{};

  Call(
      const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& starts_, const Tensor& columns_,
      const Tensor& counts_, const Tensor& cu_seqlens_, int64_t max_seqlen, int64_t block_size, double scale)
      : q(rows_contiguous(q_)),
        k(rows_contiguous(k_)),
        v(rows_contiguous(v_)),
        starts(as_contiguous(starts_)),
        columns(as_contiguous(columns_)),
        counts(as_contiguous(counts_)),
        cu_seqlens(as_contiguous(cu_seqlens_)),
        bf16(is_bfloat16(q_)) {
    STD_TORCH_CHECK(
        k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type() && k.size(0) == q.size(0) &&
            v.size(0) == q.size(0) && q.size(2) % 16 == 0 && block_size > 0,
        kOp, ": q, k and v must agree, head_dim must be a multiple of 16, block_size positive");
    offsets = checked_offsets(kOp, cu_seqlens, q.size(0), max_seqlen);
    attention.q = heads_of(q);
    attention.k = heads_of(k);
    attention.v = heads_of(v);
    attention.num_heads = q.size(1);
    attention.head_dim = q.size(2);
    attention.total_tokens = q.size(0);
    attention.scale = static_cast<float>(scale);
    attention.block_size = block_size;
    rows = q.size(0) / block_size + sequences();
    check_plan();
  }

  int64_t sequences() const { return cu_seqlens.numel() - 1; }
  int64_t length(int64_t s) const { return offsets[s + 1] - offsets[s]; }

  BlockSparseTask task(int64_t s, int64_t head) const {
    const int32_t* of_head = data(starts) + (plans > 1 ? head * rows : 0);
    return {offsets[s], length(s), head, of_head + first_row(s), data(columns), data(counts)};
  }

  // Calls run(task, scratch) for every head of every sequence. floats: block_sparse_..._scratch.
  template <class Floats, class Run>
  void for_each_task(const Floats& floats, const Run& run) const {
    for_each_head(offsets, sequences(), attention.num_heads, [&](int64_t s, int64_t head) {
      run(task(s, head), thread_scratch(floats(length(s), attention.block_size, max_entries, attention.head_dim)));
    });
  }

 private:
  static const int32_t* data(const Tensor& x) { return static_cast<const int32_t*>(x.const_data_ptr()); }
  int64_t first_row(int64_t s) const { return offsets[s] / attention.block_size + s; }

  // Python checks this for users; these checks keep direct calls of the op inside the buffers.
  void check_plan() {
    for (const Tensor* t : {&starts, &columns, &counts})
      STD_TORCH_CHECK(t->scalar_type() == ScalarType::Int && t->dim() == 1, kOp, ": the plan must be int32 vectors");
    plans = rows ? (starts.numel() - 1) / rows : 1;
    STD_TORCH_CHECK(
        (plans == 1 || plans == attention.num_heads) && starts.numel() == plans * rows + 1 &&
            columns.numel() == counts.numel(),
        kOp, ": starts must have one value for each of ", rows, " rows of one plan or of one for each head, and one more");
    for (int64_t s = 0; s < sequences(); ++s)
      for (int64_t plan = 0; plan < plans; ++plan) {
        const int64_t blocks = (length(s) + attention.block_size - 1) / attention.block_size;
        const int32_t* of_sequence = data(starts) + plan * rows + first_row(s);
        for (int64_t block = 0; block < blocks; ++block) {
          const int32_t begin = of_sequence[block], end = of_sequence[block + 1];
          STD_TORCH_CHECK(
              0 <= begin && begin <= end && end <= columns.numel(), kOp, ": starts must not decrease, and end within columns");
          for (int32_t e = begin; e < end; ++e)
            STD_TORCH_CHECK(
                data(columns)[e] >= 0 && data(columns)[e] < blocks && data(counts)[e] > 0, kOp,
                ": columns must be blocks of the sequence, counts positive");
          max_entries = std::max<int64_t>(max_entries, end - begin);
        }
      }
  }
};

std::tuple<Tensor, Tensor> forward(
    Tensor q, Tensor k, Tensor v, Tensor starts, Tensor columns, Tensor counts, Tensor cu_seqlens, int64_t max_seqlen,
    int64_t block_size, double scale) {
  Call call(q, k, v, starts, columns, counts, cu_seqlens, max_seqlen, block_size, scale);
  BlockSparseAttention& a = call.attention;
  Tensor out = empty({a.total_tokens, a.num_heads, a.head_dim}, q.scalar_type());
  Tensor lse = empty({a.num_heads, a.total_tokens}, ScalarType::Float);
  a.out = out.mutable_data_ptr();
  a.lse = static_cast<float*>(lse.mutable_data_ptr());
  call.for_each_task(block_sparse_forward_scratch, [&](const BlockSparseTask& task, float* scratch) {
    FASTENC_CALL(block_sparse_forward, a, call.bf16, task, scratch);
  });
  return {out, lse};
}

// The output is for kernels that do not compute the sums of p dp again.
std::tuple<Tensor, Tensor> backward(
    Tensor dout, Tensor /*out*/, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor starts, Tensor columns, Tensor counts,
    Tensor cu_seqlens, int64_t max_seqlen, int64_t block_size, double scale, bool wants_bias) {
  Call call(q, k, v, starts, columns, counts, cu_seqlens, max_seqlen, block_size, scale);
  BlockSparseAttention& a = call.attention;
  const Tensor dqkv = set_backward(a, q, dout, lse);
  call.for_each_task(block_sparse_backward_scratch, [&](const BlockSparseTask& task, float* scratch) {
    FASTENC_CALL(block_sparse_backward, a, call.bf16, task, scratch);
  });
  return {dqkv, bias_gradient(dqkv, wants_bias)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("block_sparse_attention_fwd", TORCH_BOX(&forward));
  m.impl("block_sparse_attention_bwd", TORCH_BOX(&backward));
}

}  // namespace fastenc
