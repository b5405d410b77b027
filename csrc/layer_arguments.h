// Checks of the arguments of the ops that run layers.
#pragma once
#include "attention.h"
#include "sequences.h"

namespace fastenc {

// op: the op that was called, for the errors.
inline const float* checked_vector(
    const char* op, const FloatVector& values, const std::optional<Tensor>& given, int64_t width) {
  STD_TORCH_CHECK(
      !given || given->numel() == width, op, ": a vector must have ", width, " elements, got ",
      given ? given->numel() : 0);
  return values.data();
}

// What a layer's attention reads beside q, k and v. Keeps alive what `terms` and `offsets` point to.
class LayerAttentionTerms {
 public:
  Attention terms{};  // without its tensors
  const int32_t* offsets;
  int64_t sequences;

  LayerAttentionTerms(
      const char* op, int64_t rows, const Tensor& cu_seqlens, int64_t max_seqlen, int64_t num_heads,
      int64_t num_key_heads, int64_t head_dim, double scale, const std::optional<Tensor>& relative_bias,
      const std::optional<Tensor>& rotary, const std::optional<Tensor>& query_norm,
      const std::optional<Tensor>& key_norm, double head_norm_eps, int64_t window_left, int64_t window_right)
      : cu_seqlens_(as_contiguous(cu_seqlens)),
        relative_bias_(relative_bias),
        rotary_(rotary),
        query_norm_(query_norm),
        key_norm_(key_norm) {
    STD_TORCH_CHECK(
        num_heads > 0 && head_dim > 0 && head_dim % 16 == 0, op, ": head_dim must be a multiple of 16");
    STD_TORCH_CHECK(
        num_key_heads > 0 && num_heads % num_key_heads == 0, op, ": num_key_heads must divide num_heads");
    STD_TORCH_CHECK(
        !relative_bias || (relative_bias->dim() == 2 && relative_bias->size(0) == num_heads &&
                           relative_bias->size(1) % 2 == 1),
        op, ": relative_bias must be (num_heads, 2 * R + 1)");
    STD_TORCH_CHECK(
        !rotary || (rotary->dim() == 2 && rotary->size(0) >= max_seqlen && rotary->size(1) <= head_dim),
        op, ": rotary must be (positions, rotary_dim)");
    terms.num_heads = num_heads;
    terms.head_dim = head_dim;
    terms.group = num_heads / num_key_heads;
    terms.scale = static_cast<float>(scale);
    terms.window_left = std::min(window_left, rows);
    terms.window_right = std::min(window_right, rows);
    terms.relative_bias = relative_bias_.data();
    terms.relative_radius = relative_bias ? relative_bias->size(1) / 2 : 0;
    terms.rotary = rotary_.data();
    terms.rotary_dim = rotary ? rotary->size(1) : 0;
    terms.query_norm = checked_vector(op, query_norm_, query_norm, head_dim);
    terms.key_norm = checked_vector(op, key_norm_, key_norm, head_dim);
    terms.head_norm_eps = static_cast<float>(head_norm_eps);
    offsets = checked_offsets(op, cu_seqlens_, rows, max_seqlen);
    sequences = cu_seqlens_.numel() - 1;
  }
  LayerAttentionTerms(const LayerAttentionTerms&) = delete;

  int64_t width() const { return terms.num_heads * terms.head_dim; }  // of a token's queries
  int64_t columns() const { return width() + 2 * width() / terms.group; }  // of q, k and v

 private:
  Tensor cu_seqlens_;
  FloatVector relative_bias_, rotary_, query_norm_, key_norm_;
};

}  // namespace fastenc
