#include "attention.h"

#include "scratch.h"
#include "sequences.h"

namespace fastenc {
namespace {

constexpr const char* kOp = "global_window_attention";

// What both directions are called with; it keeps alive what Attention and its tasks point to.
struct Call {
  Tensor q, k, v, global_tokens, cu_globals, cu_seqlens;
  bool bf16;
  const int64_t* globals;
  const int32_t *offsets, *offsets_of_globals;
  std::vector<float> key_bias;  // hides the global keys from the windows
  Attention attention{};

  Call(
      const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& global_tokens_, const Tensor& cu_globals_,
      const Tensor& cu_seqlens_, const std::optional<Tensor>& rng_state, int64_t max_seqlen, double dropout_p,
      double scale, int64_t window_left, int64_t window_right)
      : q(rows_contiguous(q_)),
        k(rows_contiguous(k_)),
        v(rows_contiguous(v_)),
        global_tokens(as_contiguous(global_tokens_)),
        cu_globals(as_contiguous(cu_globals_)),
        cu_seqlens(as_contiguous(cu_seqlens_)),
        bf16(is_bfloat16(q_)),
        key_bias(q_.size(0), 0.f) {
    const int64_t tokens = q.size(0);
    STD_TORCH_CHECK(
        k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type() && k.size(0) == tokens &&
            v.size(0) == tokens && q.size(2) % 16 == 0,
        kOp, ": q, k and v must agree, head_dim must be a multiple of 16");
    STD_TORCH_CHECK(
        global_tokens.scalar_type() == ScalarType::Long && cu_globals.numel() == cu_seqlens.numel(), kOp,
        ": global_tokens must be int64, cu_globals have an offset for each of cu_seqlens");
    offsets = checked_offsets(kOp, cu_seqlens, tokens, max_seqlen);
    offsets_of_globals = checked_offsets(kOp, cu_globals, global_tokens.numel(), max_seqlen);
    globals = static_cast<const int64_t*>(global_tokens.const_data_ptr());
    for (int64_t s = 0; s < sequences(); ++s)
      for (int64_t g = offsets_of_globals[s]; g < offsets_of_globals[s + 1]; ++g) {
        STD_TORCH_CHECK(
            offsets[s] <= globals[g] && globals[g] < offsets[s + 1], kOp,
            ": cu_globals must count the global tokens of each sequence");
        key_bias[globals[g]] = -INFINITY;
      }
    attention.q = heads_of(q);
    attention.k = heads_of(k);
    attention.v = heads_of(v);
    attention.num_heads = q.size(1);
    attention.head_dim = q.size(2);
    attention.total_q = tokens;
    attention.scale = static_cast<float>(scale);
    attention.dropout = attention.global_dropout = make_dropout(dropout_p, rng_state);
    ++attention.global_dropout.offset;
    attention.window_left = std::min(window_left, tokens);
    attention.window_right = std::min(window_right, tokens);
    attention.key_bias = key_bias.data();
  }

  int64_t sequences() const { return cu_seqlens.numel() - 1; }

  // Calls run(task, scratch) for every head of every sequence. floats: attention_..._scratch.
  template <class Floats, class Run>
  void for_each_task(const Floats& floats, const Run& run) const {
    for_each_head(offsets, sequences(), attention.num_heads, [&](int64_t s, int64_t head) {
      const int64_t first = offsets[s], length = offsets[s + 1] - first, first_global = offsets_of_globals[s];
      const int64_t count = offsets_of_globals[s + 1] - first_global;
      const AttentionTask task{first, length, first, length, head, globals + first_global, count};
      run(task, thread_scratch(floats(length, length + count + kWidestPanels, attention.head_dim)));
    });
  }

 private:
  // The keys of the window and the global ones are padded apart.
  static constexpr int64_t kWidestPanels = 128;

  static Tensor rows_contiguous(const Tensor& x) { return x.stride(2) == 1 ? x : as_contiguous(x); }
  static PackedHeads heads_of(const Tensor& x) { return {x.const_data_ptr(), x.stride(0), x.stride(1)}; }
};

// The rows of the global tokens are the caller's. Their lse is -inf, so that they have no gradient.
std::tuple<Tensor, Tensor> forward(
    Tensor q, Tensor k, Tensor v, Tensor global_tokens, Tensor cu_globals, Tensor cu_seqlens,
    std::optional<Tensor> rng_state, int64_t max_seqlen, double dropout_p, double scale, int64_t window_left,
    int64_t window_right) {
  Call call(
      q, k, v, global_tokens, cu_globals, cu_seqlens, rng_state, max_seqlen, dropout_p, scale, window_left,
      window_right);
  Attention& a = call.attention;
  Tensor out = empty({a.total_q, a.num_heads, a.head_dim}, q.scalar_type());
  Tensor lse = empty({a.num_heads, a.total_q}, ScalarType::Float);
  a.out = out.mutable_data_ptr();
  a.lse = static_cast<float*>(lse.mutable_data_ptr());
  call.for_each_task(attention_forward_scratch, [&](const AttentionTask& task, float* scratch) {
    FASTENC_CALL(attention_forward, a, call.bf16, task, scratch);
    for (int64_t g = 0; g < task.num_global_keys; ++g) a.lse[task.head * a.total_q + task.global_keys[g]] = -INFINITY;
  });
  return {out, lse};
}

// The output is for kernels that do not compute the sums of p dp again.
std::tuple<Tensor, Tensor> backward(
    Tensor dout, Tensor /*out*/, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor global_tokens, Tensor cu_globals,
    Tensor cu_seqlens, std::optional<Tensor> rng_state, int64_t max_seqlen, double dropout_p, double scale,
    int64_t window_left, int64_t window_right, bool wants_bias) {
  Call call(
      q, k, v, global_tokens, cu_globals, cu_seqlens, rng_state, max_seqlen, dropout_p, scale, window_left,
      window_right);
  Attention& a = call.attention;
  dout = as_contiguous(dout);
  lse = as_contiguous(lse);
  a.dout = dout.const_data_ptr();
  a.lse = static_cast<float*>(const_cast<void*>(lse.const_data_ptr()));  // only read
  const int64_t width = a.num_heads * a.head_dim;
  Tensor dqkv = empty({a.total_q, 3, a.num_heads, a.head_dim}, q.scalar_type());
  char* start = static_cast<char*>(dqkv.mutable_data_ptr());
  const int64_t bytes = width * (call.bf16 ? 2 : 4);  // of a token's queries
  a.dq = start;
  a.dk = start + bytes;
  a.dv = start + 2 * bytes;
  a.grad_stride = a.key_grad_stride = 3 * width;
  call.for_each_task(attention_backward_scratch, [&](const AttentionTask& task, float* scratch) {
    FASTENC_CALL(attention_backward, a, call.bf16, task, scratch);
  });
  Tensor dbias = wants_bias ? sum_columns(dqkv.const_data_ptr(), a.total_q, 3 * width, call.bf16)
                            : empty({0}, ScalarType::Float);
  return {dqkv, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("global_window_attention_fwd", TORCH_BOX(&forward));
  m.impl("global_window_attention_bwd", TORCH_BOX(&backward));
}

}  // namespace fastenc
