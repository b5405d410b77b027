#include "int8_layer.h"

#include "all_layers.h"
#include "decoder_layers.h"
#include "encoder_layer.h"
#include "int8_weights.h"
#include "layer_arguments.h"
#include "row_blocks.h"
#include "scratch.h"

namespace fastenc {
namespace {

constexpr const char *kAttention = "int8_layer_attention", *kAfterAttention = "int8_layer_after_attention";
// Threads take whole sequences where that many of the longest would give each of them even work.
constexpr int64_t kSequencesPerThread = 4;
// What a thread takes at least.
constexpr int64_t kHeads = 2, kRows = 8;

// Parts of a buffer, each on a cache line of its own.
class Buffer {
 public:
  explicit Buffer(int64_t bytes, Scratch purpose)
      : next_(reinterpret_cast<char*>(thread_scratch(bytes / 4 + 16 * kParts, purpose))) {}
  float* floats(int64_t count) { return reinterpret_cast<float*>(take(4 * count)); }
  Int8Rows rows(int64_t count, const Int8Groups& groups) {
    return Int8Rows::in(take(Int8Rows::bytes(count, groups)), count, groups);
  }

 private:
  static constexpr int64_t kParts = 8;  // at most
  char* take(int64_t bytes) {
    char* taken = next_;
    next_ += (bytes + 63) / 64 * 64;
    return taken;
  }
  char* next_;
};

const float* checked_rows(const char* op, const Tensor& x) {
  STD_TORCH_CHECK(
      x.dim() == 2 && x.scalar_type() == ScalarType::Float && x.is_contiguous(),
      op, ": rows must be contiguous float32");
  return static_cast<const float*>(x.const_data_ptr());
}

// Heads [task.head, last_head) of one sequence. bf16: with products of bfloat16.
void attend(const Attention& a, bool bf16, AttentionTask task, int64_t last_head) {
#if FASTENC_X86
  if (bf16) {
    float* scratch = thread_scratch(attention_bf16_scratch(task.length_q, task.length_k, a.head_dim));
    return avx512::attention_bf16(a, false, task, last_head, scratch);
  }
#endif
  float* scratch = thread_scratch(attention_forward_scratch(task.length_q, task.length_k, a.head_dim));
  for (; task.head < last_head; ++task.head) FASTENC_CALL(attention_forward, a, false, task, scratch);
}

// The attention of rows that begin with a sequence, from their q, k and v.
Attention attention_of(const Attention& terms, const float* qkv, int64_t rows, float* out, float* lse) {
  Attention a = terms;
  set_packed(a, qkv);
  a.total_q = rows;
  a.out = out;
  a.lse = lse;
  return a;
}

void attend_to_sequences(
    const LayerAttentionTerms& given, const Int8Weight& qkv, bool bf16, const float* x, int64_t first_sequence,
    int64_t last_sequence, float* attended) {
  const int64_t first = given.offsets[first_sequence], rows = given.offsets[last_sequence] - first;
  const int64_t heads = given.terms.num_heads, width = given.width();
  if (!rows) return;  // longer sequences than blocks
  const Int8Groups groups(qkv.depth);
  Buffer buffer(Int8Rows::bytes(rows, groups) + 4 * rows * (qkv.columns + heads), Scratch::operands);
  const Int8Rows quantised = buffer.rows(rows, groups);
  float* projected = buffer.floats(rows * qkv.columns);
  const Attention a =
      attention_of(given.terms, projected, rows, attended + first * width, buffer.floats(rows * heads));
  FASTENC_CALL_INT8(int8_quantise, x + first * qkv.depth, qkv.depth, 0, rows, quantised);
  const Int8Product product{quantised, qkv, 0, rows, 0, qkv.columns, projected, qkv.columns, false, qkv.packed};
  FASTENC_CALL_INT8(int8_multiply, product);
  for (int64_t s = first_sequence; s < last_sequence; ++s) {
    const int64_t start = given.offsets[s] - first, length = given.offsets[s + 1] - given.offsets[s];
    attend(a, bf16, {start, length, start, length, 0}, heads);
  }
}

Tensor attention(
    Tensor x, Tensor cu_seqlens, int64_t max_seqlen, std::optional<Tensor> relative_bias, std::optional<Tensor> rotary,
    Tensor qkv, std::optional<Tensor> qkv_bias, int64_t num_heads, int64_t num_key_heads, int64_t head_dim,
    double scale, std::optional<Tensor> query_norm, std::optional<Tensor> key_norm, double head_norm_eps,
    int64_t window_left, int64_t window_right, bool bf16) {
  x = as_contiguous(x);
  const float* x_rows = checked_rows(kAttention, x);
  const LayerAttentionTerms given(
      kAttention, x.size(0), cu_seqlens, max_seqlen, num_heads, num_key_heads, head_dim, scale, relative_bias, rotary,
      query_norm, key_norm, head_norm_eps, window_left, window_right);
  const int64_t rows = x.size(0), columns = given.columns();
  STD_TORCH_CHECK(!bf16 || has_bf16_panels(), kAttention, ": this instruction set does not multiply bfloat16");
  const FloatVector bias(qkv_bias);
  const Int8Weight weight = checked_int8(
      kAttention, qkv, checked_vector(kAttention, bias, qkv_bias, columns), x.size(1), columns);
  Tensor attended = empty({rows, given.width()}, ScalarType::Float);
  auto* attended_rows = static_cast<float*>(attended.mutable_data_ptr());
  int64_t longest = 0;
  for (int64_t s = 0; s < given.sequences; ++s)
    longest = std::max<int64_t>(longest, given.offsets[s + 1] - given.offsets[s]);
  const int64_t threads = torch::stable::get_num_threads();
  if (threads == 1 || (rows > kInt8FewRows && longest * kSequencesPerThread * threads <= rows)) {
    const int64_t blocks = number_of_row_blocks(rows);
    const auto bounds = share_sequences(given.offsets, given.sequences, blocks);
    torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block)
        attend_to_sequences(given, weight, bf16, x_rows, bounds[block], bounds[block + 1], attended_rows);
    });
    return attended;
  }
  const int64_t floats = rows * (columns + num_heads);
  std::optional<Tensor> held;  // few rows keep their memory from call to call
  if (rows > kInt8FewRows) held = empty({floats}, ScalarType::Float);
  float* projected = held ? static_cast<float*>(held->mutable_data_ptr()) : thread_scratch(floats, Scratch::layer);
  float* lse = projected + rows * columns;
  parallel_int8_linear(x_rows, rows, weight, projected);
  const Attention a = attention_of(given.terms, projected, rows, attended_rows, lse);
  torch::stable::parallel_for(0, given.sequences * num_heads, kHeads, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t sequence = task / num_heads, start = given.offsets[sequence];
      const int64_t length = given.offsets[sequence + 1] - start;
      const int64_t head = task % num_heads;
      attend(a, bf16, {start, length, start, length, head}, head + 1);
    }
  });
  return attended;
}

struct AfterAttention {
  Int8Weight attention_out, up, down;
  std::optional<Int8Weight> gate;
  LayerNormTerms attention_norm, out_norm;
  LayerNormTerms attention_own_norm, down_own_norm;  // of the sublayers' outputs; weight null: none
  Activation activation;
  bool pre_norm, rms;
};

// Rows [first, last) of a block, normalised in place. `added` and `sum`, or null, as norm_in_place has them.
void normalise(
    const AfterAttention& l, const LayerNormTerms& terms, float* block, const float* added, float* sum, int64_t first,
    int64_t last) {
  const int64_t width = l.down.columns;
  const LayerNormForward norm = norm_in_place(terms, width, l.rms, block, added, sum);
  FASTENC_CALL(layer_norm_forward, norm, false, first, last, thread_scratch(layer_norm_forward_scratch(width)));
}

// The same, and quantised; in steps that stay in the first cache.
void normalise_and_quantise(
    const AfterAttention& l, float* block, const float* added, float* sum, int64_t first, int64_t last,
    const Int8Rows& to) {
  constexpr int64_t kStep = 16;
  for (int64_t row = first; row < last; row += kStep) {
    const int64_t end = std::min(row + kStep, last);
    if (l.attention_own_norm.weight) normalise(l, l.attention_own_norm, block, nullptr, nullptr, row, end);
    normalise(l, l.attention_norm, block, added, sum, row, end);
    FASTENC_CALL_INT8(int8_quantise, block, l.down.columns, row, end, to);
  }
}

// The norms after the product of down.
void end_layer(
    const AfterAttention& l, float* y, const float* added, float* next_residual, int64_t first, int64_t last) {
  if (l.down_own_norm.weight) normalise(l, l.down_own_norm, y, nullptr, nullptr, first, last);
  normalise(l, l.out_norm, y, added, next_residual, first, last);
}

// The inner columns that exist at a time: whole groups.
int64_t slab_columns(const Int8Groups& inner) {
  return std::min(inner.depth, kInt8LargestGroup / inner.size * inner.size);
}

void after_attention_rows(
    const AfterAttention& l, const float* attended, const float* residual, float* y, float* next_residual,
    int64_t rows) {
  const int64_t hidden = l.down.columns, width = l.attention_out.depth;
  const Int8Groups attended_groups(width), hidden_groups(hidden), inner_groups(l.down.depth);
  const int64_t slab = slab_columns(inner_groups);
  Buffer buffer(
      Int8Rows::bytes(rows, attended_groups) + Int8Rows::bytes(rows, hidden_groups) +
          Int8Rows::bytes(rows, inner_groups.part(slab)) + 4 * rows * (2 * hidden + 2 * slab),
      Scratch::operands);
  const Int8Rows quantised = buffer.rows(rows, attended_groups), normalised = buffer.rows(rows, hidden_groups);
  const Int8Rows activated = buffer.rows(rows, inner_groups.part(slab));
  float* h = buffer.floats(rows * hidden);
  float* sums = l.pre_norm ? buffer.floats(rows * hidden) : nullptr;
  float *inner = buffer.floats(rows * slab), *gate = l.gate ? buffer.floats(rows * slab) : nullptr;
  auto multiply = [&](const Int8Rows& a, const Int8Weight& w, int64_t first_group, int64_t left, int64_t columns,
                      float* c, int64_t stride, bool add, const char* next) {
    const Int8Product product{a, w, first_group, rows, left, columns, c, stride, add, next};
    FASTENC_CALL_INT8(int8_multiply, product);
  };
  FASTENC_CALL_INT8(int8_quantise, attended, width, 0, rows, quantised);
  multiply(quantised, l.attention_out, 0, 0, hidden, h, hidden, false, l.up.packed);
  normalise_and_quantise(l, h, residual, sums, 0, rows, normalised);
  for (int64_t left = 0; left < l.down.depth; left += slab) {
    const int64_t columns = std::min(slab, l.down.depth - left);
    Int8Rows slab_rows = activated;
    slab_rows.groups = inner_groups.part(columns);
    multiply(normalised, l.up, 0, left, columns, inner, slab, false, l.down.packed);
    if (l.gate) multiply(normalised, *l.gate, 0, left, columns, gate, slab, false, l.down.packed);
    FASTENC_CALL_INT8(int8_activate, l.activation, inner, gate, slab, 0, rows, slab_rows);
    multiply(slab_rows, l.down, left / inner_groups.size, 0, hidden, y, hidden, left > 0, l.up.packed);
  }
  end_layer(l, y, l.pre_norm ? sums : h, next_residual, 0, rows);
}

// The same for few rows: the threads divide the columns of each product.
void after_attention_few_rows(
    const AfterAttention& l, const float* attended, const float* residual, float* y, float* next_residual,
    int64_t rows) {
  const int64_t hidden = l.down.columns, inner_width = l.down.depth;
  const Int8Groups hidden_groups(hidden), inner_groups(inner_width);
  Buffer buffer(
      Int8Rows::bytes(rows, hidden_groups) + Int8Rows::bytes(rows, inner_groups) +
          4 * rows * (2 * hidden + 2 * inner_width),
      Scratch::layer);
  const Int8Rows normalised = buffer.rows(rows, hidden_groups), activated = buffer.rows(rows, inner_groups);
  float *h = buffer.floats(rows * hidden), *sums = l.pre_norm ? buffer.floats(rows * hidden) : nullptr;
  float* inner = buffer.floats(rows * inner_width);
  float* gate = l.gate ? buffer.floats(rows * inner_width) : nullptr;
  auto multiply = [&](const Int8Rows& a, const Int8Weight& w, float* c) {
    parallel_int8_columns({a, w, 0, rows, 0, w.columns, c, w.columns, false, w.packed});
  };
  parallel_int8_linear(attended, rows, l.attention_out, h);
  torch::stable::parallel_for(0, rows, kRows, [&](int64_t begin, int64_t end) {
    normalise_and_quantise(l, h, residual, sums, begin, end, normalised);
  });
  multiply(normalised, l.up, inner);
  if (l.gate) multiply(normalised, *l.gate, gate);
  torch::stable::parallel_for(0, rows, grain(inner_width), [&](int64_t begin, int64_t end) {
    FASTENC_CALL_INT8(int8_activate, l.activation, inner, gate, inner_width, begin, end, activated);
  });
  multiply(activated, l.down, y);
  torch::stable::parallel_for(0, rows, kRows, [&](int64_t begin, int64_t end) {
    end_layer(l, y, l.pre_norm ? sums : h, next_residual, begin, end);
  });
}

// (y, the next layer's residual), which is empty after a post-norm layer, where it is y.
std::tuple<Tensor, Tensor> after_attention(
    Tensor attended, Tensor residual, Tensor attention_out, std::optional<Tensor> attention_out_bias,
    Tensor attention_norm_weight, std::optional<Tensor> attention_norm_bias, Tensor up, std::optional<Tensor> gate,
    std::optional<Tensor> up_bias, Tensor down, std::optional<Tensor> down_bias, Tensor out_norm_weight,
    std::optional<Tensor> out_norm_bias, std::optional<Tensor> attention_own_norm,
    std::optional<Tensor> down_own_norm, int64_t inner, int64_t activation, bool pre_norm, bool rms,
    double attention_norm_eps, double out_norm_eps) {
  attended = as_contiguous(attended);
  residual = as_contiguous(residual);
  const float *attended_rows = checked_rows(kAfterAttention, attended), *x = checked_rows(kAfterAttention, residual);
  const int64_t rows = residual.size(0), hidden = residual.size(1), width = attended.size(1);
  STD_TORCH_CHECK(attended.size(0) == rows, kAfterAttention, ": attended must have the residual's rows");
  STD_TORCH_CHECK(activation >= 0 && activation <= 3, kAfterAttention, ": unknown activation ", activation);
  const FloatVector out_bias(attention_out_bias), up_values(up_bias), down_values(down_bias);
  const FloatVector norm1(attention_norm_weight), norm1_bias(attention_norm_bias);
  const FloatVector norm2(out_norm_weight), norm2_bias(out_norm_bias);
  const FloatVector own_norm1(attention_own_norm), own_norm2(down_own_norm);
  const auto vector = [&](const FloatVector& values, const std::optional<Tensor>& given, int64_t columns) {
    return checked_vector(kAfterAttention, values, given, columns);
  };
  const float* of_up = vector(up_values, up_bias, gate ? 2 * inner : inner);
  AfterAttention layer{
      checked_int8(kAfterAttention, attention_out, vector(out_bias, attention_out_bias, hidden), width, hidden),
      checked_int8(kAfterAttention, up, of_up, hidden, inner),
      checked_int8(kAfterAttention, down, vector(down_values, down_bias, hidden), inner, hidden),
      std::nullopt,
      {vector(norm1, attention_norm_weight, hidden), vector(norm1_bias, attention_norm_bias, hidden),
       static_cast<float>(attention_norm_eps)},
      {vector(norm2, out_norm_weight, hidden), vector(norm2_bias, out_norm_bias, hidden),
       static_cast<float>(out_norm_eps)},
      {vector(own_norm1, attention_own_norm, hidden), nullptr, static_cast<float>(attention_norm_eps)},
      {vector(own_norm2, down_own_norm, hidden), nullptr, static_cast<float>(out_norm_eps)},
      static_cast<Activation>(activation),
      pre_norm,
      rms};
  if (gate) layer.gate = checked_int8(kAfterAttention, *gate, of_up ? of_up + inner : nullptr, hidden, inner);
  Tensor y = empty({rows, hidden}, ScalarType::Float);
  Tensor next_residual = empty({pre_norm ? rows : 0, hidden}, ScalarType::Float);
  auto* y_rows = static_cast<float*>(y.mutable_data_ptr());
  auto* next_rows = pre_norm ? static_cast<float*>(next_residual.mutable_data_ptr()) : nullptr;
  if (rows <= kInt8FewRows && torch::stable::get_num_threads() > 1) {
    after_attention_few_rows(layer, attended_rows, x, y_rows, next_rows, rows);
    return {y, next_residual};
  }
  for_row_blocks(rows, 1, [&](int64_t first, int64_t last) {
    after_attention_rows(
        layer, attended_rows + first * width, x + first * hidden, y_rows + first * hidden,
        pre_norm ? next_rows + first * hidden : nullptr, last - first);
  });
  return {y, next_residual};
}

std::vector<Tensor> layers(
    Tensor x, Tensor residual, Tensor cu_seqlens, int64_t max_seqlen, std::vector<Tensor> relative_biases,
    std::vector<Tensor> rotaries, std::optional<Tensor> output_tokens, int64_t count, std::vector<Tensor> tensors,
    std::vector<int64_t> integers, std::vector<double> reals) {
  return run_layers(
      "int8_layers", attention, after_attention, x, residual, cu_seqlens, max_seqlen, relative_biases, rotaries,
      output_tokens, count, tensors, integers, reals);
}

void multiply_int8(
    const char* op, const float* x, int64_t rows, const Tensor& packed, const float* bias, int64_t depth,
    int64_t columns, float* y) {
  parallel_int8_linear(x, rows, checked_int8(op, packed, bias, depth, columns), y);
}

std::vector<Tensor> decoder_layers(
    Tensor x, Tensor residual, std::vector<Tensor> caches, int64_t length, std::vector<Tensor> sources,
    Tensor cu_seqlens, int64_t max_seqlen, std::vector<Tensor> relative_biases, int64_t count,
    std::vector<Tensor> tensors, std::vector<int64_t> integers, std::vector<double> reals) {
  return run_decoder_layers(
      "int8_decoder_layers", attend_in_decoder<multiply_int8>, after_attention, x, residual, caches, length, sources,
      cu_seqlens, max_seqlen, relative_biases, count, tensors, integers, reals);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("int8_layer_attention", TORCH_BOX(&attention));
  m.impl("int8_layer_after_attention", TORCH_BOX(&after_attention));
  m.impl("int8_layers", TORCH_BOX(&layers));
  m.impl("int8_decoder_layers", TORCH_BOX(&decoder_layers));
}

}  // namespace fastenc
