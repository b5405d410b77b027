#include <type_traits>

#include "convert.h"
#include "encoder_layer.h"
#include "gemm.h"
#include "scratch.h"
#include "tensors.h"

namespace fastenc {
namespace {

// The least numbers of heads and of rows in a task.
constexpr int64_t kHeads = 2, kRows = 8;

// `count` elements of x from the first one on as floats: x's own, or those of a bfloat16 x widened into `buffer`.
const float* floats_of(const void* x, bool bf16, int64_t first, int64_t count, float* buffer) {
  if (!bf16) return static_cast<const float*>(x) + first;
  FASTENC_CALL(widen, static_cast<const bfloat16*>(x) + first, buffer, count);
  return buffer;
}

// Element `index` of x.
template <class Void>
Void* element(Void* x, bool bf16, int64_t index) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
  return static_cast<Byte*>(x) + index * (bf16 ? sizeof(bfloat16) : sizeof(float));
}

void attend(const LayerAttention& layer, const Attention& a, const AttentionTask& task) {
  float* scratch = thread_scratch(layer_head_scratch(layer, task.length_k));
#if FASTENC_X86
  if (layer.pairs) return avx512::attention_bf16(a, true, task, task.head + 1, scratch);
#endif
  FASTENC_CALL(attention_forward, a, false, task, scratch);
}

}  // namespace

void multiply_few_rows(
    const void* a, bool bf16, int64_t stride, const LayerLinear& linear, bool pairs, int64_t rows, float* c) {
  if (linear.weight && pairs)
    return parallel_gemm(
        GemmTiles{a, bf16, stride, linear.weight, linear.bias, c, rows, linear.columns, linear.depth});
  if (linear.weight) {
    Gemm m{};
    m.a = static_cast<const float*>(a);
    m.a_row = stride;
    m.a_depth = 1;
    m.packed_b = linear.weight;
    m.bias = linear.bias;
    m.c = c;
    m.rows = rows;
    m.columns = linear.columns;
    m.depth = linear.depth;
    parallel_gemm(m);
    return;
  }
  GemmFewRows m{a, bf16, stride, linear.plain, linear.bias, c, rows};
  if (!bf16 && linear.plain.bf16 && has_bf16_dot_products()) {
    auto* narrowed = reinterpret_cast<bfloat16*>(thread_scratch(rows * linear.depth / 2, Scratch::operands));
    for (int64_t row = 0; row < rows; ++row)
      FASTENC_CALL(narrow, static_cast<const float*>(a) + row * stride, narrowed + row * linear.depth, linear.depth);
    m.a = narrowed;
    m.a_bf16 = true;
    m.a_row = linear.depth;
  }
  parallel_gemm(m);
}

void layer_attention_few_rows(
    const LayerAttention& layer, const void* x, int64_t first_sequence, int64_t last_sequence, void* attended) {
  const int64_t columns = layer.qkv.columns, depth = layer.qkv.depth;
  const int64_t first = layer.offsets[first_sequence], rows = layer.offsets[last_sequence] - first;
  Attention a = layer.terms;
  float* qkv = thread_scratch(rows * (columns + depth + a.num_heads), Scratch::layer);
  float* widened = qkv + rows * columns;
  const bool narrow = layer.bf16 && layer.pairs;
  const void* x_rows = narrow ? element(x, true, first * depth)
                              : floats_of(x, layer.bf16, first * depth, rows * depth, widened);
  multiply_few_rows(x_rows, narrow, depth, layer.qkv, layer.pairs, rows, qkv);
  set_packed(a, qkv);
  a.total_q = rows;
  a.out = element(attended, layer.pairs, first * a.num_heads * a.head_dim);
  a.lse = widened + rows * depth;
  const int64_t tasks = (last_sequence - first_sequence) * a.num_heads;
  torch::stable::parallel_for(0, tasks, kHeads, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t sequence = first_sequence + task / a.num_heads, start = layer.offsets[sequence] - first;
      const int64_t length = layer.offsets[sequence + 1] - layer.offsets[sequence];
      attend(layer, a, {start, length, start, length, task % a.num_heads});
    }
  });
}

void layer_after_attention_few_rows(
    const LayerAfterAttention& layer, const void* attended, const void* residual, int64_t first, int64_t last, void* y,
    void* next_residual) {
  const int64_t rows = last - first, hidden = layer.down.columns, start = first * hidden, count = rows * hidden;
  float* h = thread_scratch(4 * count + rows * layer.up.columns, Scratch::layer);
  float *sums = h + count, *widened = sums + count, *out = widened + count, *up = out + count;
  if (!layer.bf16) out = static_cast<float*>(y) + start;
  auto normalise = [&](float* block, const float* added, float* sum, const LayerNormTerms& terms) {
    const LayerNormForward norm = norm_in_place(terms, hidden, layer.rms, block, added, sum);
    torch::stable::parallel_for(0, rows, kRows, [&](int64_t begin, int64_t end) {
      float* scratch = thread_scratch(layer_norm_forward_scratch(hidden));
      FASTENC_CALL(layer_norm_forward, norm, false, begin, end, scratch);
    });
  };
  const int64_t width = layer.attention_out.depth;
  multiply_few_rows(
      element(attended, layer.pairs, first * width), layer.pairs, width, layer.attention_out, layer.pairs, rows, h);
  if (layer.attention_own_norm.weight) normalise(h, nullptr, nullptr, layer.attention_own_norm);
  const float* before = floats_of(residual, layer.bf16, start, count, widened);
  normalise(h, before, layer.pre_norm ? sums : nullptr, layer.attention_norm);
  multiply_few_rows(h, false, hidden, layer.up, layer.pairs, rows, up);
  torch::stable::parallel_for(0, rows, grain(layer.up.columns), [&](int64_t begin, int64_t end) {
    FASTENC_CALL(layer_activation, layer, up, begin, end);
  });
  multiply_few_rows(up, false, layer.up.columns, layer.down, layer.pairs, rows, out);
  if (layer.down_own_norm.weight) normalise(out, nullptr, nullptr, layer.down_own_norm);
  float* next = layer.bf16 ? widened : static_cast<float*>(next_residual) + start;
  normalise(out, layer.pre_norm ? sums : h, layer.pre_norm ? next : nullptr, layer.out_norm);
  if (!layer.bf16) return;
  FASTENC_CALL(narrow, out, static_cast<bfloat16*>(y) + start, count);
  if (layer.pre_norm) FASTENC_CALL(narrow, next, static_cast<bfloat16*>(next_residual) + start, count);
}

}  // namespace fastenc
