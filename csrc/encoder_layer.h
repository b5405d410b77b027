// A layer in inference on a CPU, a block of rows at a time:
//   attended = Attention(x W_qkv + b_qkv), whole sequences;
//   s = residual + attended W_out + b_out, h = Norm(s), y = Norm(r + FFN(h)), any rows.
// A sublayer's output may have a norm of its own before it is added to the residual.
// Post-norm: the residual is x, and r = h. Pre-norm: r = s, and the sum r + FFN(h) is the next layer's residual.
#pragma once
#include <cstdint>

#include "activation.h"
#include "attention.h"
#include "isa.h"
#include "layer_norm.h"
#include "packed_weights.h"

namespace fastenc {

struct LayerLinear {
  const float* weight;  // packed as packed_weights.h says, in pairs if the layer has `pairs`; or null: plain
  WeightRows plain;
  const float* bias;  // or null
  int64_t depth, columns;
};

struct LayerNormTerms {
  const float* weight;
  const float* bias;  // or null
  float eps;
};

struct LayerAttention {
  LayerLinear qkv;
  Attention terms;         // heads, scale, window and biases; its tensors are set block by block
  const int32_t* offsets;  // of all sequences
  bool bf16;               // x; all else is float
  // The weights are bfloat16 and packed in pairs: attention multiplies bfloat16 too, and its results are.
  bool pairs;
};

struct LayerAfterAttention {
  LayerLinear attention_out, up, down;  // gated: the first half of up's columns is activated, the second multiplies it
  LayerNormTerms attention_norm, out_norm;
  LayerNormTerms attention_own_norm, down_own_norm;  // of the sublayers' outputs; weight null: none
  Activation activation;
  bool gated, pre_norm, rms;
  bool bf16;  // residual, y and next_residual; all else is float
  bool pairs;  // as in LayerAttention: attended is bfloat16 too
};

// The norm of a block of rows, in place. `added` is added to the rows first; `sum`, or null, gets the rows after that.
// Static, because every instruction set compiles a copy.
static inline LayerNormForward norm_in_place(
    const LayerNormTerms& terms, int64_t width, bool rms, float* block, const float* added, float* sum) {
  LayerNormForward norm{};
  norm.x = norm.y = block;
  norm.residual = added;
  norm.h = sum;
  norm.weight = terms.weight;
  norm.bias = terms.bias;
  norm.width = width;
  norm.eps = terms.eps;
  norm.rms = rms;
  return norm;
}

// Columns of the inner activations that are computed at a time. A multiple of whole tiles.
constexpr int64_t kInnerColumns = 256, kTileInnerColumns = 512;

// Floats of scratch for a head of a sequence, for these sequences, and for this number of rows.
int64_t layer_head_scratch(const LayerAttention&, int64_t length);
int64_t layer_attention_scratch(const LayerAttention&, int64_t first_sequence, int64_t last_sequence);
int64_t layer_after_attention_scratch(const LayerAfterAttention&, int64_t rows);

// Widths are multiples of 16. x, attended, residual, y and next_residual hold every row.
FASTENC_FOR_EACH_ISA(
    void layer_attention(
        const LayerAttention&, const void* x, void* attended, int64_t first_sequence, int64_t last_sequence,
        float* scratch);
    void layer_after_attention(
        const LayerAfterAttention&, const void* attended, const void* residual, void* y, void* next_residual,
        int64_t first, int64_t last, float* scratch);
    // Activates rows [first, last) of x W_up + b_up in place. A gated layer's result is the first half of each row.
    void layer_activation(const LayerAfterAttention&, float* up, int64_t first, int64_t last);)

// c = a W^T + bias of few rows; row r of a, floats or bfloat16, is at its element r * stride. The threads divide the
// columns. pairs: as in LayerAttention; without, a is float.
void multiply_few_rows(
    const void* a, bool bf16, int64_t stride, const LayerLinear&, bool pairs, int64_t rows, float* c);

// For few rows: the threads divide the columns of each product. The weights need not be packed. Inside a parallel region
// one thread computes all of it.
void layer_attention_few_rows(
    const LayerAttention&, const void* x, int64_t first_sequence, int64_t last_sequence, void* attended);
void layer_after_attention_few_rows(
    const LayerAfterAttention&, const void* attended, const void* residual, int64_t first, int64_t last, void* y,
    void* next_residual);

}  // namespace fastenc
