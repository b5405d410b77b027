#include "encoder_layer.h"

#include <deque>

#include "all_layers.h"
#include "decoder_layers.h"
#include "layer_arguments.h"
#include "row_blocks.h"
#include "scratch.h"
#include "weights.h"

namespace fastenc {

int64_t layer_head_scratch(const LayerAttention& l, int64_t length) {
  return l.pairs ? attention_bf16_scratch(length, length, l.terms.head_dim)
                 : attention_forward_scratch(length, length, l.terms.head_dim);
}

int64_t layer_attention_scratch(const LayerAttention& l, int64_t first_sequence, int64_t last_sequence) {
  const int64_t rows = l.offsets[last_sequence] - l.offsets[first_sequence];
  int64_t longest = 0;
  for (int64_t s = first_sequence; s < last_sequence; ++s)
    longest = std::max<int64_t>(longest, l.offsets[s + 1] - l.offsets[s]);
  const int64_t operands = l.pairs ? tile_rows_floats(rows, l.qkv.depth) : l.bf16 ? rows * l.qkv.depth : 0;
  return rows * (l.qkv.columns + l.terms.num_heads) + operands + 16 + layer_head_scratch(l, longest);
}

int64_t layer_after_attention_scratch(const LayerAfterAttention& l, int64_t rows) {
  const int64_t hidden = l.down.columns;
  const int64_t blocks = 1 + l.pre_norm + (l.bf16 ? 2 : 0), inner = l.pairs ? kTileInnerColumns : kInnerColumns;
  const int64_t operands =
      l.pairs ? tile_rows_floats(rows, std::max(hidden, l.attention_out.depth)) + tile_rows_floats(rows, inner) : 0;
  return rows * (blocks * hidden + (l.gated ? 2 : 1) * inner) + operands + layer_norm_forward_scratch(hidden);
}

namespace {

constexpr const char *kAttention = "encoder_layer_attention", *kAfterAttention = "encoder_layer_after_attention";

// Whether any number of rows reads the weights unpacked, so that a row's result does not depend on their number: Arm's
// products of pairs have no packed form.
bool are_read_plain(const std::vector<Tensor>& weights) {
  return is_bfloat16(weights.at(0)) && has_bf16_dot_products() && !has_bf16_panels();
}

// Whether the weights are multiplied in pairs, packed or not.
bool are_pairs(const std::vector<Tensor>& weights) { return is_bfloat16(weights.at(0)) && has_bf16_panels(); }

// Three cases: packed by the caller; packed here into thread scratch, for one call, so that no copy can grow stale; or
// read unpacked.
class LayerWeights {
 public:
  // op: the op's name, for errors.
  LayerWeights(const char* op, bool packed, bool unpacked, bool pairs)
      : op_(op), packed_(packed), unpacked_(unpacked), pairs_(pairs) {}

  // To be called for every weight before the first is packed: the scratch moves when it grows.
  void reserve(int64_t columns, int64_t depth) {
    if (!packed_ && !unpacked_) floats_ += floats_of(columns, depth);
  }

  LayerLinear linear(const std::vector<Tensor>& tensors, const FloatVector& bias, int64_t depth, int64_t columns) {
    STD_TORCH_CHECK(columns % 16 == 0 && depth % 16 == 0, op_, ": widths must be multiples of 16");
    if (packed_) {
      const auto* packed =
          pairs_ ? checked_tiles(tensors[0], depth, columns) : checked_packed(tensors[0], depth, columns);
      return {packed, {}, bias.data(), depth, columns};
    }
    const Weight& weight = plain_.emplace_back(tensors);
    STD_TORCH_CHECK(
        weight.depth() == depth && weight.columns() == columns, op_, ": a weight must be (", columns, ", ", depth,
        "), got (", weight.columns(), ", ", weight.depth(), ")");
    if (unpacked_) return {nullptr, weight.rows(), bias.data(), depth, columns};
    float* target = thread_scratch(floats_, Scratch::weights) + used_;
    pairs_ ? weight.pack_tiles(target) : weight.pack(target);
    used_ += floats_of(columns, depth);
    return {target, {}, bias.data(), depth, columns};
  }

 private:
  int64_t floats_of(int64_t columns, int64_t depth) const {
    return pairs_ ? tile_weight_floats(columns, depth) : packed_floats(columns, depth);
  }

  const char* op_;
  bool packed_, unpacked_, pairs_;
  std::deque<Weight> plain_;
  int64_t floats_ = 0, used_ = 0;
};

const void* checked_rows(const char* op, const Tensor& x, ScalarType dtype) {
  STD_TORCH_CHECK(
      x.dim() == 2 && x.scalar_type() == dtype && x.is_contiguous(),
      op, ": rows must be contiguous and of one dtype");
  return x.const_data_ptr();
}

Tensor attention(
    Tensor x, Tensor cu_seqlens, int64_t max_seqlen, std::optional<Tensor> relative_bias, std::optional<Tensor> rotary,
    bool few_rows, std::vector<Tensor> qkv, std::optional<Tensor> qkv_bias, bool packed, int64_t num_heads,
    int64_t num_key_heads, int64_t head_dim, double scale, std::optional<Tensor> query_norm,
    std::optional<Tensor> key_norm, double head_norm_eps, int64_t window_left, int64_t window_right) {
  x = as_contiguous(x);
  const auto* x_rows = checked_rows(kAttention, x, x.scalar_type());
  const LayerAttentionTerms given(
      kAttention, x.size(0), cu_seqlens, max_seqlen, num_heads, num_key_heads, head_dim, scale, relative_bias, rotary,
      query_norm, key_norm, head_norm_eps, window_left, window_right);
  const int64_t rows = x.size(0), columns = given.columns(), sequences = given.sequences;
  const FloatVector bias(qkv_bias);
  checked_vector(kAttention, bias, qkv_bias, columns);
  const bool plain = !packed && are_read_plain(qkv), pairs = are_pairs(qkv);
  LayerWeights weights(kAttention, packed, few_rows || plain, pairs);
  weights.reserve(columns, x.size(1));
  LayerAttention layer{};
  layer.qkv = weights.linear(qkv, bias, x.size(1), columns);
  layer.terms = given.terms;
  layer.offsets = given.offsets;
  layer.bf16 = is_bfloat16(x);
  layer.pairs = pairs;
  Tensor attended = empty({rows, given.width()}, pairs ? ScalarType::BFloat16 : ScalarType::Float);
  void* attended_rows = attended.mutable_data_ptr();
  if (few_rows) {
    layer_attention_few_rows(layer, x_rows, 0, sequences, attended_rows);
    return attended;
  }
  const int64_t blocks = number_of_row_blocks(rows);
  const auto bounds = share_sequences(layer.offsets, sequences, blocks);
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = bounds[block], last = bounds[block + 1];
      if (layer.offsets[first] == layer.offsets[last]) continue;  // an empty block: a sequence is longer than a block
      if (plain) {
        layer_attention_few_rows(layer, x_rows, first, last, attended_rows);
        continue;
      }
      float* scratch = thread_scratch(layer_attention_scratch(layer, first, last));
      FASTENC_CALL(layer_attention, layer, x_rows, attended_rows, first, last, scratch);
    }
  });
  return attended;
}

// Returns (y, the next layer's residual). The residual is empty after a post-norm layer, where it equals y.
std::tuple<Tensor, Tensor> after_attention(
    Tensor attended, Tensor residual, bool few_rows, std::vector<Tensor> attention_out,
    std::optional<Tensor> attention_out_bias, Tensor attention_norm_weight, std::optional<Tensor> attention_norm_bias,
    std::vector<Tensor> up, std::optional<Tensor> up_bias, std::vector<Tensor> down, std::optional<Tensor> down_bias,
    Tensor out_norm_weight, std::optional<Tensor> out_norm_bias, std::optional<Tensor> attention_own_norm,
    std::optional<Tensor> down_own_norm, bool packed, int64_t inner, int64_t activation, bool gated, bool pre_norm,
    bool rms, double attention_norm_eps, double out_norm_eps) {
  attended = as_contiguous(attended);
  residual = as_contiguous(residual);
  const auto dtype = residual.scalar_type();
  const bool plain = !packed && are_read_plain(up), pairs = are_pairs(up);
  if (is_bfloat16(attended) != pairs)
    attended = torch::stable::to(attended, pairs ? ScalarType::BFloat16 : ScalarType::Float);
  const auto* attended_rows = checked_rows(kAfterAttention, attended, attended.scalar_type());
  const auto* residual_rows = checked_rows(kAfterAttention, residual, dtype);
  const int64_t rows = residual.size(0), hidden = residual.size(1), width = attended.size(1);
  const int64_t up_columns = gated ? 2 * inner : inner;
  STD_TORCH_CHECK(attended.size(0) == rows, kAfterAttention, ": attended must have the residual's rows");
  STD_TORCH_CHECK(activation >= 0 && activation <= 3, kAfterAttention, ": unknown activation ", activation);
  const FloatVector out_bias(attention_out_bias), up_values(up_bias), down_values(down_bias);
  const FloatVector norm1(attention_norm_weight), norm1_bias(attention_norm_bias);
  const FloatVector norm2(out_norm_weight), norm2_bias(out_norm_bias);
  const FloatVector own_norm1(attention_own_norm), own_norm2(down_own_norm);
  checked_vector(kAfterAttention, out_bias, attention_out_bias, hidden);
  checked_vector(kAfterAttention, up_values, up_bias, up_columns);
  checked_vector(kAfterAttention, down_values, down_bias, hidden);
  LayerWeights weights(kAfterAttention, packed, few_rows || plain, pairs);
  weights.reserve(hidden, width);
  weights.reserve(up_columns, hidden);
  weights.reserve(hidden, inner);
  LayerAfterAttention layer{};
  layer.attention_out = weights.linear(attention_out, out_bias, width, hidden);
  layer.up = weights.linear(up, up_values, hidden, up_columns);
  layer.down = weights.linear(down, down_values, inner, hidden);
  layer.attention_norm = {
      checked_vector(kAfterAttention, norm1, attention_norm_weight, hidden),
      checked_vector(kAfterAttention, norm1_bias, attention_norm_bias, hidden),
      static_cast<float>(attention_norm_eps)};
  layer.out_norm = {
      checked_vector(kAfterAttention, norm2, out_norm_weight, hidden),
      checked_vector(kAfterAttention, norm2_bias, out_norm_bias, hidden),
      static_cast<float>(out_norm_eps)};
  layer.attention_own_norm = {
      checked_vector(kAfterAttention, own_norm1, attention_own_norm, hidden), nullptr, layer.attention_norm.eps};
  layer.down_own_norm = {
      checked_vector(kAfterAttention, own_norm2, down_own_norm, hidden), nullptr, layer.out_norm.eps};
  layer.activation = static_cast<Activation>(activation);
  layer.gated = gated;
  layer.pre_norm = pre_norm;
  layer.rms = rms;
  layer.bf16 = is_bfloat16(residual);
  layer.pairs = pairs;
  Tensor y = empty({rows, hidden}, dtype);
  Tensor next_residual = empty({pre_norm ? rows : 0, hidden}, dtype);
  auto *y_rows = y.mutable_data_ptr(), *next_rows = next_residual.mutable_data_ptr();
  if (few_rows) {
    layer_after_attention_few_rows(layer, attended_rows, residual_rows, 0, rows, y_rows, next_rows);
    return {y, next_residual};
  }
  for_row_blocks(rows, pairs ? kAmxRows : 1, [&](int64_t first, int64_t last) {
    if (plain)
      return layer_after_attention_few_rows(layer, attended_rows, residual_rows, first, last, y_rows, next_rows);
    float* scratch = thread_scratch(layer_after_attention_scratch(layer, last - first));
    FASTENC_CALL(layer_after_attention, layer, attended_rows, residual_rows, y_rows, next_rows, first, last, scratch);
  });
  return {y, next_residual};
}

// All layers of few rows, their weights packed.
std::vector<Tensor> layers(
    Tensor x, Tensor residual, Tensor cu_seqlens, int64_t max_seqlen, std::vector<Tensor> relative_biases,
    std::vector<Tensor> rotaries, std::optional<Tensor> output_tokens, int64_t count, std::vector<Tensor> tensors,
    std::vector<int64_t> integers, std::vector<double> reals) {
  return run_layers(
      "encoder_layers", attention, after_attention, x, residual, cu_seqlens, max_seqlen, relative_biases, rotaries,
      output_tokens, count, tensors, integers, reals, true);
}

void multiply_packed(
    const char* op, const float* x, int64_t rows, const Tensor& packed, const float* bias, int64_t depth,
    int64_t columns, float* y) {
  STD_TORCH_CHECK(columns % 16 == 0 && depth % 16 == 0, op, ": widths must be multiples of 16");
  const LayerLinear linear{checked_packed(packed, depth, columns), {}, bias, depth, columns};
  multiply_few_rows(x, false, depth, linear, false, rows, y);
}

std::vector<Tensor> decoder_layers(
    Tensor x, Tensor residual, std::vector<Tensor> caches, int64_t length, std::vector<Tensor> sources,
    Tensor cu_seqlens, int64_t max_seqlen, std::vector<Tensor> relative_biases, int64_t count,
    std::vector<Tensor> tensors, std::vector<int64_t> integers, std::vector<double> reals) {
  return run_decoder_layers(
      "decoder_layers", attend_in_decoder<multiply_packed>, after_attention, x, residual, caches, length, sources,
      cu_seqlens, max_seqlen, relative_biases, count, tensors, integers, reals, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("encoder_layer_attention", TORCH_BOX(&attention));
  m.impl("encoder_layer_after_attention", TORCH_BOX(&after_attention));
  m.impl("encoder_layers", TORCH_BOX(&layers));
  m.impl("decoder_layers", TORCH_BOX(&decoder_layers));
}

}  // namespace fastenc
