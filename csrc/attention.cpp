#include "packed_heads.h"

#include "scratch.h"
#include "sequences.h"

namespace fastenc {

namespace {

// Floats for a ScoreBias and for the sums of score gradients at each distance.
int64_t bias_scratch(int64_t length_q, int64_t length_k) { return 2 * length_q + 3 * length_k + 512; }

}  // namespace

// Enough for the widest vectors and panels; the kernels divide it.
int64_t attention_forward_scratch(int64_t length_q, int64_t length_k, int64_t head_dim) {
  const int64_t padded = (length_k + 127) / 128 * 128, rows = kAttentionRows;
  return 2 * padded * head_dim + rows * (padded + 16) + 2 * rows * head_dim + padded +
         bias_scratch(length_q, length_k);
}

int64_t attention_backward_scratch(int64_t length_q, int64_t length_k, int64_t head_dim) {
  const int64_t padded = (length_k + 127) / 128 * 128, rows = kAttentionRows;
  return 5 * padded * head_dim + 3 * rows * (padded + 16) + 3 * rows * head_dim +
         bias_scratch(length_q, length_k);
}

int64_t attention_bf16_scratch(int64_t length_q, int64_t length_k, int64_t head_dim) {
  const int64_t padded = (length_k + 127) / 128 * 128, dim = (head_dim + 63) / 64 * 64, rows = kAttentionRows;
  const int64_t operands = padded * dim + rows * (dim + padded + 64);  // keys, values, queries, probabilities: pairs
  return operands + rows * (padded + 16) + std::max(padded, rows) * dim + bias_scratch(length_q, length_k);
}

namespace {

// The arguments of the forward and the backward. Keeps alive the tensors that Attention points to.
struct Call {
  const char* op;  // for errors
  Tensor q, k, v, cu_seqlens_q, cu_seqlens_k;
  FloatVector alibi_slopes, relative_bias, key_bias;
  std::optional<Tensor> rotary;
  int64_t max_seqlen_q, max_seqlen_k;
  bool bf16;
  Attention attention{};

  Call(
      const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& offsets_q,
      const std::optional<Tensor>& offsets_k, const std::optional<Tensor>& rng_state,
      const std::optional<Tensor>& slopes, const std::optional<Tensor>& table,
      const std::optional<Tensor>& added_to_keys, const std::optional<Tensor>& rotary_table, int64_t max_q,
      int64_t max_k, double dropout_p, double scale, int64_t window_left, int64_t window_right)
      : op(offsets_k ? "cross_attention" : "attention"),
        q(rows_contiguous(q_)),
        k(rows_contiguous(k_)),
        v(rows_contiguous(v_)),
        cu_seqlens_q(as_contiguous(offsets_q)),
        cu_seqlens_k(offsets_k ? as_contiguous(*offsets_k) : cu_seqlens_q),
        alibi_slopes(slopes),
        relative_bias(table),
        key_bias(added_to_keys),
        max_seqlen_q(max_q),
        max_seqlen_k(max_k),
        bf16(is_bfloat16(q_)) {
    STD_TORCH_CHECK(
        k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type() && k.size(0) == v.size(0),
        op, ": q, k and v must agree in dtype, and k and v in length");
    STD_TORCH_CHECK(
        cu_seqlens_q.numel() == cu_seqlens_k.numel(), op, ": queries and keys must have as many sequences");
    const int64_t num_heads = q.size(1), key_heads = k.size(1), tokens = q.size(0) + k.size(0);
    STD_TORCH_CHECK(
        key_heads == v.size(1) && (key_heads ? num_heads % key_heads == 0 : num_heads == 0),
        op, ": k and v must have as many heads, which divide those of q");
    STD_TORCH_CHECK(
        (!slopes || slopes->numel() == num_heads) && (!added_to_keys || added_to_keys->numel() == k.size(0)) &&
            (!table || (table->dim() == 2 && table->size(0) == num_heads && table->size(1) % 2 == 1)),
        op, ": alibi_slopes must be (num_heads,), relative_bias (num_heads, 2 * R + 1), key_bias (total_k,)");
    attention.q = heads_of(q);
    attention.k = heads_of(k);
    attention.v = heads_of(v);
    attention.num_heads = num_heads;
    attention.head_dim = q.size(2);
    attention.group = key_heads ? num_heads / key_heads : 1;
    attention.total_q = q.size(0);
    attention.scale = static_cast<float>(scale);
    attention.dropout = make_dropout(dropout_p, rng_state);
    attention.window_left = std::min(window_left, tokens);
    attention.window_right = std::min(window_right, tokens);
    attention.alibi_slopes = alibi_slopes.data();
    attention.relative_bias = relative_bias.data();
    attention.relative_radius = table ? table->size(1) / 2 : 0;
    attention.key_bias = key_bias.data();
    if (!rotary_table) return;
    STD_TORCH_CHECK(!offsets_k, op, ": rotary counts the positions of queries and keys of the same sequences");
    rotary = checked_rotary_table(op, *rotary_table, max_q, attention.head_dim);
    attention.rotary = static_cast<const float*>(rotary->const_data_ptr());
    attention.rotary_dim = rotary->size(1);
  }

  // Calls run(task) for each of `heads` heads of every sequence.
  template <class Run>
  void for_each_task(int64_t heads, const Run& run) const {
    const auto* offsets_q = checked_offsets(op, cu_seqlens_q, q.size(0), max_seqlen_q);
    const auto* offsets_k = checked_offsets(op, cu_seqlens_k, k.size(0), max_seqlen_k);
    for_each_head(offsets_q, cu_seqlens_q.numel() - 1, heads, [&](int64_t s, int64_t head) {
      run(AttentionTask{
          offsets_q[s], offsets_q[s + 1] - offsets_q[s], offsets_k[s], offsets_k[s + 1] - offsets_k[s], head});
    });
  }
};

std::tuple<Tensor, Tensor> forward(
    Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, std::optional<Tensor> cu_seqlens_k,
    std::optional<Tensor> rng_state, std::optional<Tensor> alibi_slopes, std::optional<Tensor> relative_bias,
    std::optional<Tensor> key_bias, std::optional<Tensor> rotary, std::optional<Tensor> /*bounds*/,
    std::optional<Tensor> /*every_block*/, std::optional<Tensor> /*long_blocks*/, int64_t max_seqlen_q,
    int64_t max_seqlen_k, double dropout_p, double scale, int64_t window_left, int64_t window_right) {
  Call call(
      q, k, v, cu_seqlens_q, cu_seqlens_k, rng_state, alibi_slopes, relative_bias, key_bias, rotary, max_seqlen_q,
      max_seqlen_k, dropout_p, scale, window_left, window_right);
  Attention& a = call.attention;
  Tensor out = empty({a.total_q, a.num_heads, a.head_dim}, q.scalar_type());
  Tensor lse = empty({a.num_heads, a.total_q}, ScalarType::Float);
  a.out = out.mutable_data_ptr();
  a.lse = static_cast<float*>(lse.mutable_data_ptr());
  call.for_each_task(a.num_heads, [&](const AttentionTask& task) {
    float* scratch = thread_scratch(attention_forward_scratch(task.length_q, task.length_k, a.head_dim));
    FASTENC_CALL(attention_forward, a, call.bf16, task, scratch);
  });
  return {out, lse};
}

// The sums of score gradients at each distance, for every sequence and head: 2 * tokens * heads floats. They are added
// to the table afterwards, in the order of the sequences, so that it does not depend on the number of threads.
class DistanceGradients {
 public:
  DistanceGradients(const Call& call, bool wanted) : call_(call) {
    if (wanted) sums_.resize(call.attention.num_heads * stride());
  }
  int64_t stride() const { return call_.q.size(0) + call_.k.size(0); }
  float* data() { return sums_.empty() ? nullptr : sums_.data(); }

  // Adds the sums to a table of distances -R ... R for each head; distances beyond count as -R or R.
  void add_to(Tensor& table) const {
    const auto* offsets_q = static_cast<const int32_t*>(call_.cu_seqlens_q.const_data_ptr());
    const auto* offsets_k = static_cast<const int32_t*>(call_.cu_seqlens_k.const_data_ptr());
    const int64_t radius = call_.attention.relative_radius, columns = 2 * radius + 1;
    torch::stable::parallel_for(0, call_.attention.num_heads, 1, [&](int64_t first, int64_t last) {
      for (int64_t head = first; head < last; ++head) {
        std::vector<double> by_column(columns, 0.0);
        for (int64_t s = 0; s + 1 < call_.cu_seqlens_q.numel(); ++s) {
          const int64_t length_q = offsets_q[s + 1] - offsets_q[s], length_k = offsets_k[s + 1] - offsets_k[s];
          if (!length_q || !length_k) continue;
          const float* sums = sums_.data() + head * stride() + offsets_q[s] + offsets_k[s] + length_k - 1;
          for (int64_t distance = 1 - length_k; distance < length_q; ++distance)
            by_column[std::clamp(distance, -radius, radius) + radius] += sums[distance];
        }
        auto* row = static_cast<float*>(table.mutable_data_ptr()) + head * columns;
        for (int64_t c = 0; c < columns; ++c) row[c] = static_cast<float>(by_column[c]);
      }
    });
  }

 private:
  const Call& call_;
  std::vector<float> sums_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor dout, std::optional<Tensor> dlse, Tensor /*out*/, Tensor lse, Tensor q, Tensor k, Tensor v,
    Tensor cu_seqlens_q, std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> rng_state,
    std::optional<Tensor> alibi_slopes, std::optional<Tensor> relative_bias, std::optional<Tensor> key_bias,
    std::optional<Tensor> rotary, std::optional<Tensor> /*bounds*/, std::optional<Tensor> /*every_block*/,
    std::optional<Tensor> /*long_blocks*/, int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p,
    double scale, int64_t window_left, int64_t window_right, bool packed,
    bool wants_relative_bias, bool wants_bias) {
  Call call(
      q, k, v, cu_seqlens_q, cu_seqlens_k, rng_state, alibi_slopes, relative_bias, key_bias, rotary, max_seqlen_q,
      max_seqlen_k, dropout_p, scale, window_left, window_right);
  Attention& a = call.attention;
  dout = as_contiguous(dout);
  lse = as_contiguous(lse);
  a.dout = dout.const_data_ptr();
  a.lse = static_cast<float*>(const_cast<void*>(lse.const_data_ptr()));  // only read
  if (dlse) {
    dlse = as_contiguous(*dlse);
    a.dlse = static_cast<const float*>(dlse->const_data_ptr());
  }
  const auto dtype = q.scalar_type();
  const int64_t width = a.num_heads * a.head_dim, key_width = k.size(1) * a.head_dim, keys = k.size(0);
  const int64_t packed_width = width + 2 * key_width;
  Tensor dq, dk = empty({0}, dtype), dv = empty({0}, dtype);
  if (packed) {
    dq = empty({a.total_q, a.num_heads + 2 * k.size(1), a.head_dim}, dtype);
    char* start = static_cast<char*>(dq.mutable_data_ptr());
    const int64_t bytes = call.bf16 ? 2 : 4;
    a.dq = start;
    a.dk = start + width * bytes;
    a.dv = start + (width + key_width) * bytes;
  } else {
    dq = empty({a.total_q, a.num_heads, a.head_dim}, dtype);
    dk = empty({keys, k.size(1), a.head_dim}, dtype);
    dv = empty({keys, k.size(1), a.head_dim}, dtype);
    a.dq = dq.mutable_data_ptr();
    a.dk = dk.mutable_data_ptr();
    a.dv = dv.mutable_data_ptr();
  }
  a.grad_stride = packed ? packed_width : width;
  a.key_grad_stride = packed ? packed_width : key_width;
  DistanceGradients distances(call, wants_relative_bias);
  a.ddistance = distances.data();
  a.ddistance_stride = distances.stride();
  call.for_each_task(k.size(1), [&](const AttentionTask& task) {
    float* scratch = thread_scratch(attention_backward_scratch(task.length_q, task.length_k, a.head_dim));
    FASTENC_CALL(attention_backward, a, call.bf16, task, scratch);
  });
  Tensor dbias = wants_bias ? sum_columns(dq.const_data_ptr(), a.total_q, packed_width, call.bf16) : empty({0}, dtype);
  if (!wants_relative_bias) return {dq, dk, dv, empty({0}, dtype), dbias};
  Tensor drelative_bias = empty({a.num_heads, 2 * a.relative_radius + 1}, ScalarType::Float);
  distances.add_to(drelative_bias);
  return {dq, dk, dv, drelative_bias, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("attention_fwd", TORCH_BOX(&forward));
  m.impl("attention_bwd", TORCH_BOX(&backward));
}

}  // namespace fastenc
