// One more token of each target through all layers of a decoder, in one op. Separate ops would take longer than the
// arithmetic of so few rows.
#pragma once
#include "all_layers.h"
#include "encoder_layer.h"
#include "layer_arguments.h"
#include "scratch.h"

namespace fastenc {

// What the layers of a step share. Target t attends to source t / (targets / sources).
struct DecoderStep {
  const char* op;
  int64_t targets, length;  // the new tokens are one for each target; the tokens of each target before them
  int64_t sources, source_tokens, longest_source;
  const int32_t* source_offsets;
};

// y = x W^T + bias for a packed weight W (columns, depth).
using MultiplyPacked = void(
    const char* op, const float* x, int64_t rows, const Tensor& packed, const float* bias, int64_t depth,
    int64_t columns, float* y);

inline const float* checked_floats(
    const char* op, const char* name, const Tensor& x, std::initializer_list<int64_t> sizes) {
  bool fits = x.scalar_type() == ScalarType::Float && x.is_contiguous() && x.dim() == static_cast<int64_t>(sizes.size());
  int64_t dim = 0;
  for (const int64_t size : sizes) fits = fits && x.size(dim++) == size;
  STD_TORCH_CHECK(fits, op, ": ", name, " must be contiguous float32 of the shape that the other arguments give");
  return static_cast<const float*>(x.const_data_ptr());
}

// run(target, head) for each target and head. cost: the multiplications of one call.
template <class Run>
void for_each_target(int64_t targets, int64_t heads, int64_t cost, const Run& run) {
  torch::stable::parallel_for(0, targets * heads, grain(cost), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(i / heads, i % heads);
  });
}

// A layer up to its attention to the source: (what is attended to, the residual of that sublayer's end).
//   h = Norm(residual + SelfAttention(x) W_out + b_out), attended = Attention(h W_query + b_query, source)
// cache: (2, room, targets, heads, head_dim), keys and values of the tokens so far; the new ones are written behind them.
// source: (source_tokens, 2 * heads * head_dim), its keys and values.
template <MultiplyPacked* multiply>
std::tuple<Tensor, Tensor> attend_in_decoder(
    const DecoderStep* step, Tensor x, Tensor residual, Tensor cache, Tensor source,
    std::optional<Tensor> relative_bias, Tensor qkv, std::optional<Tensor> qkv_bias, Tensor attention_out,
    std::optional<Tensor> attention_out_bias, Tensor norm_weight, std::optional<Tensor> norm_bias, Tensor query,
    std::optional<Tensor> query_bias, int64_t heads, int64_t head_dim, double scale, bool pre_norm, bool rms,
    double eps) {
  const char* op = step->op;
  const int64_t rows = step->targets, hidden = x.size(1), width = heads * head_dim, length = step->length;
  STD_TORCH_CHECK(heads > 0 && head_dim > 0 && head_dim % 16 == 0, op, ": head_dim must be a multiple of 16");
  const float* x_rows = checked_floats(op, "x", x, {rows, hidden});
  const float* residual_rows = checked_floats(op, "residual", residual, {rows, hidden});
  const float* source_rows = checked_floats(op, "source", source, {step->source_tokens, 2 * width});
  STD_TORCH_CHECK(cache.dim() == 5 && length < cache.size(1), op, ": the cache has no room for a token");
  const int64_t room = cache.size(1);
  checked_floats(op, "a cache", cache, {2, room, rows, heads, head_dim});
  STD_TORCH_CHECK(
      !relative_bias || (relative_bias->dim() == 2 && relative_bias->size(0) == heads && relative_bias->size(1) % 2),
      op, ": relative_bias must be (num_heads, 2 * R + 1)");
  const FloatVector bias(relative_bias), of_qkv(qkv_bias), of_out(attention_out_bias), of_query(query_bias);
  const FloatVector weight(norm_weight), of_norm(norm_bias);
  const auto vector = [&](const FloatVector& values, const std::optional<Tensor>& given, int64_t size) {
    return checked_vector(op, values, given, size);
  };
  Tensor attended = empty({rows, width}, ScalarType::Float), before = empty({rows, hidden}, ScalarType::Float);
  auto* out = static_cast<float*>(attended.mutable_data_ptr());
  auto* before_rows = static_cast<float*>(before.mutable_data_ptr());
  float* projected = thread_scratch(rows * (3 * width + hidden + heads), Scratch::layer);
  float* normalised = pre_norm ? projected + rows * 3 * width : before_rows;
  multiply(op, x_rows, rows, qkv, vector(of_qkv, qkv_bias, 3 * width), hidden, 3 * width, projected);

  auto* keys = static_cast<float*>(cache.mutable_data_ptr());
  float* values = keys + room * rows * width;
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = projected + row * 3 * width;
    const int64_t to = (length * rows + row) * width;
    std::memcpy(keys + to, from + width, width * sizeof(float));
    std::memcpy(values + to, from + 2 * width, width * sizeof(float));
  }
  Attention a{};
  a.num_heads = heads;
  a.head_dim = head_dim;
  a.total_q = rows;
  a.scale = static_cast<float>(scale);
  a.out = out;
  a.lse = projected + rows * (3 * width + hidden);
  const auto attend = [&](const Attention& of_target, const AttentionTask& task) {
    float* scratch = thread_scratch(attention_forward_scratch(1, task.length_k, head_dim));
    FASTENC_CALL(attention_forward, of_target, false, task, scratch);
  };
  for_each_target(rows, heads, (length + 1) * head_dim, [&](int64_t row, int64_t head) {
    Attention self = a;
    self.q = {projected, 3 * width, head_dim};
    self.k = {keys + row * width, rows * width, head_dim};
    self.v = {values + row * width, rows * width, head_dim};
    self.relative_bias = bias.data();
    self.relative_radius = relative_bias ? relative_bias->size(1) / 2 : 0;
    attend(self, {row, 1, 0, length + 1, head});
  });

  multiply(op, out, rows, attention_out, nullptr, width, hidden, normalised);
  const LayerNormTerms terms{
      vector(weight, norm_weight, hidden), vector(of_norm, norm_bias, hidden), static_cast<float>(eps)};
  LayerNormForward norm =
      norm_in_place(terms, hidden, rms, normalised, residual_rows, pre_norm ? before_rows : nullptr);
  norm.x_bias = vector(of_out, attention_out_bias, hidden);
  FASTENC_CALL(layer_norm_forward, norm, false, 0, rows, thread_scratch(layer_norm_forward_scratch(hidden)));

  multiply(op, normalised, rows, query, vector(of_query, query_bias, width), hidden, width, projected);
  a.q = {projected, width, head_dim};
  a.k = {source_rows, 2 * width, head_dim};
  a.v = {source_rows + width, 2 * width, head_dim};
  for_each_target(rows, heads, step->longest_source * head_dim, [&](int64_t row, int64_t head) {
    const int32_t* ends = step->source_offsets + row / (rows / step->sources);
    attend(a, {row, 1, ends[0], ends[1] - ends[0], head});
  });
  return {attended, before};
}

// All layers: `attend`, and `end`, the op of a layer's rest. Returns what run_layers returns.
template <class Attend, class End, class... Given>
std::vector<Tensor> run_decoder_layers(
    const char* op, Attend attend, End end, Tensor x, Tensor residual, const std::vector<Tensor>& caches,
    int64_t length, const std::vector<Tensor>& sources, const Tensor& cu_seqlens, int64_t max_seqlen,
    const std::vector<Tensor>& relative_biases, int64_t layers, const std::vector<Tensor>& tensors,
    const std::vector<int64_t>& integers, const std::vector<double>& reals, Given... given) {
  const auto of_each = [&](const std::vector<Tensor>& values) { return static_cast<int64_t>(values.size()) == layers; };
  STD_TORCH_CHECK(
      of_each(caches) && of_each(sources) && (relative_biases.empty() || of_each(relative_biases)), op,
      ": a cache and a source for each layer, and a relative bias for each or none");
  STD_TORCH_CHECK(layers > 0 && x.dim() == 2 && length >= 0, op, ": x must be (targets, hidden_size)");
  const Tensor offsets = as_contiguous(cu_seqlens);
  const int64_t source_tokens = sources[0].dim() == 2 ? sources[0].size(0) : 0;
  DecoderStep step{op, x.size(0), length, offsets.numel() - 1, source_tokens, max_seqlen, nullptr};
  step.source_offsets = checked_offsets(op, offsets, source_tokens, max_seqlen);
  STD_TORCH_CHECK(
      step.sources > 0 && step.targets % step.sources == 0, op, ": each source must have the same number of targets");
  FixedArguments fixed(op, tensors, integers, reals);
  x = as_contiguous(x);
  residual = as_contiguous(residual);
  std::vector<Tensor> states;
  for (int64_t layer = 0; layer < layers; ++layer) {
    auto [attended, before] = call_with_fixed(
        attend, fixed, &step, x, residual, caches[layer], sources[layer],
        table_of(relative_biases, layer));
    auto [y, next] = call_with_fixed(end, fixed, attended, before, given...);
    residual = next.size(0) ? next : y;
    x = y;
    states.push_back(layer + 1 < layers ? residual : x);
  }
  fixed.check_all_read();
  return states;
}

}  // namespace fastenc
