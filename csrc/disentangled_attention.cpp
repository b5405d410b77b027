#include "packed_heads.h"

#include "scratch.h"
#include "sequences.h"

namespace fastenc {

// For the widest vectors; the kernels lay it out.
int64_t position_scratch(int64_t length, int64_t head_dim) {
  return kAttentionRows * (length + kAttentionRows + 48) + 16 * (kAttentionRows + 16) + length * head_dim + 64;
}

namespace {

constexpr const char* kOp = "disentangled_attention";

template <class T>
void widen_row(const T* source, int64_t count, float factor, float* target) {
  for (int64_t c = 0; c < count; ++c) {
    if constexpr (sizeof(T) == sizeof(float))
      target[c] = source[c] * factor;
    else
      target[c] = to_float(source[c]) * factor;
  }
}

// What both directions are called with; it keeps alive what Attention points to.
struct Call {
  Tensor q, k, v, slots, cu_seqlens;
  std::optional<Tensor> position_keys, position_queries;
  bool bf16;
  const int32_t* offsets;
  int64_t sequences, rows = 0;
  Attention attention{};
  PositionTables tables{};

  Call(
      const Tensor& q_, const Tensor& k_, const Tensor& v_, const std::optional<Tensor>& keys,
      const std::optional<Tensor>& queries, const Tensor& slots_, const Tensor& cu_seqlens_,
      const std::optional<Tensor>& rng_state, int64_t max_seqlen, double dropout_p, double scale)
      : q(rows_contiguous(q_)),
        k(rows_contiguous(k_)),
        v(rows_contiguous(v_)),
        slots(as_contiguous(slots_)),
        cu_seqlens(as_contiguous(cu_seqlens_)),
        bf16(is_bfloat16(q_)) {
    const int64_t heads = q.size(1), dim = q.size(2);
    STD_TORCH_CHECK(
        k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type() && k.size(0) == q.size(0) &&
            v.size(0) == q.size(0) && dim % 16 == 0 && dim > 0,
        kOp, ": q, k and v must agree, head_dim must be a multiple of 16");
    for (const auto* table : {&keys, &queries}) {
      if (!*table) continue;
      const Tensor& given = **table;
      STD_TORCH_CHECK(
          given.dim() == 3 && given.size(1) == heads && given.size(2) == dim &&
              given.scalar_type() == q.scalar_type() && (!rows || rows == given.size(0)),
          kOp, ": the tables must be (rows, ", heads, ", ", dim, ") of q's dtype");
      rows = given.size(0);
    }
    if (keys) position_keys = as_contiguous(*keys);
    if (queries) position_queries = as_contiguous(*queries);
    sequences = cu_seqlens.numel() - 1;
    offsets = checked_offsets(kOp, cu_seqlens, q.size(0), max_seqlen);
    attention.q = heads_of(q);
    attention.k = heads_of(k);
    attention.v = heads_of(v);
    attention.num_heads = heads;
    attention.head_dim = dim;
    attention.total_q = q.size(0);
    attention.scale = static_cast<float>(scale);
    attention.dropout = make_dropout(dropout_p, rng_state);
    for (int64_t s = 0; s < sequences; ++s)
      tables.longest = std::max<int64_t>(tables.longest, offsets[s + 1] - offsets[s]);
    tables.longest = std::max<int64_t>(tables.longest, 1);
    // Not a multiple of the page size, where columns would share few cache sets.
    tables.stride = (distances() + kPositionRoom + 15) / 16 * 16 + 16;
    read_slots();
  }

  int64_t distances() const { return 2 * tables.longest - 1; }
  int64_t table_floats() const { return attention.num_heads * attention.head_dim * tables.stride; }
  // The table's row for a distance counted from 0.
  int64_t row_of(int64_t distance) const { return row_of_distance_[distance]; }

  // Expands the tables to distances: transposed, and for the backward also row by row.
  void expand(bool backward) {
    const int64_t each = table_floats() * (backward ? 2 : 1);
    const int64_t count = position_keys.has_value() + position_queries.has_value();
    float* target = thread_scratch(count * each, Scratch::layer);
    auto expand_one = [&](const Tensor& table, float factor, const float*& transposed, const float*& by_rows) {
      transposed = target;
      if (backward) by_rows = target + table_floats();
      bf16 ? expand_table<bfloat16>(table, factor, target, backward)
           : expand_table<float>(table, factor, target, backward);
      target += each;
    };
    if (position_keys) expand_one(*position_keys, 1.f, tables.keys_t, tables.keys);
    if (position_queries) expand_one(*position_queries, attention.scale, tables.queries_t, tables.queries);
    if (count) attention.positions = &tables;
  }

  int64_t length(int64_t s) const { return offsets[s + 1] - offsets[s]; }
  AttentionTask task(int64_t s, int64_t head) const { return {offsets[s], length(s), offsets[s], length(s), head}; }

 private:
  void read_slots() {
    const auto* values = static_cast<const int32_t*>(slots.const_data_ptr());
    const int64_t reach = slots.numel() / 2;
    STD_TORCH_CHECK(
        slots.scalar_type() == ScalarType::Int && slots.numel() % 2 == 1, kOp, ": slots must be int32 (2 * R + 1,)");
    row_of_distance_.resize(distances());
    for (int64_t i = 0; i < distances(); ++i) {
      const int32_t row = values[std::clamp(i - (tables.longest - 1), -reach, reach) + reach];
      STD_TORCH_CHECK(!rows || (row >= 0 && row < rows), kOp, ": slots must be rows of the tables, got ", row);
      row_of_distance_[i] = row;
    }
  }

  template <class T>
  void expand_table(const Tensor& table, float factor, float* target, bool backward) const {
    const int64_t heads = attention.num_heads, dim = attention.head_dim, stride = tables.stride;
    const T* source = static_cast<const T*>(table.const_data_ptr());
    torch::stable::parallel_for(0, heads, 1, [&](int64_t first, int64_t last) {
      std::vector<float> row(dim);
      for (int64_t head = first; head < last; ++head) {
        float* transposed = target + head * dim * stride;
        float* by_rows = backward ? target + table_floats() + head * stride * dim : nullptr;
        for (int64_t i = 0; i < distances(); ++i) {
          widen_row(source + (row_of(i) * heads + head) * dim, dim, factor, row.data());
          for (int64_t c = 0; c < dim; ++c) transposed[c * stride + i] = row[c];
          if (backward) std::copy(row.begin(), row.end(), by_rows + i * dim);
        }
        for (int64_t c = 0; c < dim; ++c)
          std::fill(transposed + c * stride + distances(), transposed + (c + 1) * stride, 0.f);
      }
    });
  }

  std::vector<int32_t> row_of_distance_;
};

std::tuple<Tensor, Tensor> forward(
    Tensor q, Tensor k, Tensor v, std::optional<Tensor> position_keys, std::optional<Tensor> position_queries,
    Tensor slots, Tensor cu_seqlens, std::optional<Tensor> rng_state, int64_t max_seqlen, double dropout_p,
    double scale) {
  Call call(
      q, k, v, position_keys, position_queries, slots, cu_seqlens, rng_state, max_seqlen, dropout_p, scale);
  Attention& a = call.attention;
  call.expand(false);
  Tensor out = empty({a.total_q, a.num_heads, a.head_dim}, q.scalar_type());
  Tensor lse = empty({a.num_heads, a.total_q}, ScalarType::Float);
  a.out = out.mutable_data_ptr();
  a.lse = static_cast<float*>(lse.mutable_data_ptr());
  for_each_head(call.offsets, call.sequences, a.num_heads, [&](int64_t s, int64_t head) {
    const int64_t length = call.length(s);
    float* scratch = thread_scratch(
        attention_forward_scratch(length, length, a.head_dim) + position_scratch(length, a.head_dim));
    FASTENC_CALL(attention_forward, a, call.bf16, call.task(s, head), scratch);
  });
  return {out, lse};
}

// The gradients of the tables: sums over a fixed number of groups of sequences, which do not depend on the number of
// threads, added in the order of the groups.
class TableGradients {
 public:
  explicit TableGradients(const Call& call) : call_(call) {
    const int64_t heads = call.attention.num_heads;
    const int64_t wanted = std::max<int64_t>(1, 32 / std::max<int64_t>(1, heads));  // enough tasks for many threads
    groups_ = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, call.sequences));
    bounds_ = share_sequences(call.offsets, call.sequences, groups_);
    tables_ = call.position_keys.has_value() + call.position_queries.has_value();
    sums_.resize(groups_ * heads * tables_ * size(), 0.f);
  }

  // Calls run(task, positions) for every sequence and head, with the sums of its group and head.
  template <class Run>
  void for_each_task(const Run& run) {
    const int64_t heads = call_.attention.num_heads, count = groups_ * heads;
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, std::min<int64_t>(count, torch::stable::get_num_threads()), 1, [&](auto, auto) {
      for (int64_t i; (i = next.fetch_add(1)) < count;) {
        PositionTables positions = call_.tables;
        positions.dkeys = sums(i, false);
        positions.dqueries = sums(i, true);
        for (int64_t s = bounds_[i / heads]; s < bounds_[i / heads + 1]; ++s)
          run(call_.task(s, i % heads), positions);
      }
    });
  }

  // The gradient of one of the tables, in its dtype, times `factor`.
  Tensor total(const std::optional<Tensor>& table, bool of_queries, float factor) {
    if (!table) return empty({0}, call_.q.scalar_type());
    const int64_t heads = call_.attention.num_heads, dim = call_.attention.head_dim, rows = call_.rows;
    Tensor result = empty({rows, heads, dim}, table->scalar_type());
    void* target = result.mutable_data_ptr();
    torch::stable::parallel_for(0, heads, 1, [&](int64_t first, int64_t last) {
      std::vector<float> by_row(rows * dim);
      for (int64_t head = first; head < last; ++head) {
        std::fill(by_row.begin(), by_row.end(), 0.f);
        for (int64_t group = 0; group < groups_; ++group) {
          const float* of_distance = sums(group * heads + head, of_queries);
          for (int64_t i = 0; i < call_.distances(); ++i)
            for (int64_t c = 0; c < dim; ++c) by_row[call_.row_of(i) * dim + c] += of_distance[i * dim + c];
        }
        for (int64_t row = 0; row < rows; ++row)
          for (int64_t c = 0; c < dim; ++c) {
            const int64_t at = (row * heads + head) * dim + c;
            const float value = by_row[row * dim + c] * factor;
            if (call_.bf16)
              static_cast<bfloat16*>(target)[at] = to_bfloat16(value);
            else
              static_cast<float*>(target)[at] = value;
          }
      }
    });
    return result;
  }

 private:
  int64_t size() const { return call_.distances() * call_.attention.head_dim; }
  float* sums(int64_t task, bool of_queries) {
    const bool second = of_queries && call_.position_keys.has_value();
    return sums_.data() + (task * tables_ + second) * size();
  }

  const Call& call_;
  int64_t groups_, tables_;
  std::vector<int64_t> bounds_;
  std::vector<float> sums_;
};

// The output is for kernels that do not compute the sums of p dp again.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    Tensor dout, Tensor /*out*/, Tensor lse, Tensor q, Tensor k, Tensor v, std::optional<Tensor> position_keys,
    std::optional<Tensor> position_queries, Tensor slots, Tensor cu_seqlens, std::optional<Tensor> rng_state,
    int64_t max_seqlen, double dropout_p, double scale, bool wants_bias) {
  Call call(
      q, k, v, position_keys, position_queries, slots, cu_seqlens, rng_state, max_seqlen, dropout_p, scale);
  Attention& a = call.attention;
  call.expand(true);
  const Tensor dqkv = set_backward(a, q, dout, lse);
  a.key_grad_stride = a.grad_stride;
  TableGradients gradients(call);
  gradients.for_each_task([&](const AttentionTask& task, const PositionTables& positions) {
    Attention of_task = a;
    if (a.positions) of_task.positions = &positions;
    const int64_t length = task.length_q;
    float* scratch = thread_scratch(
        attention_backward_scratch(length, length, a.head_dim) + position_scratch(length, a.head_dim));
    FASTENC_CALL(attention_backward, of_task, call.bf16, task, scratch);
  });
  return {
      dqkv, gradients.total(call.position_keys, false, 1.f), gradients.total(call.position_queries, true, a.scale),
      bias_gradient(dqkv, wants_bias)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("disentangled_attention_fwd", TORCH_BOX(&forward));
  m.impl("disentangled_attention_bwd", TORCH_BOX(&backward));
}

}  // namespace fastenc
