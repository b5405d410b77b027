// A layer in inference and float32, a block of rows at a time: mixed = Attention(x W_qkv + b_qkv), whole sequences;
// h = LN(x + mixed W_out + b_out), y = LN(h + GELU(h W_up + b_up) W_down + b_down), any rows.
#pragma once
#include <cstdint>

#include "activation.h"
#include "isa.h"

namespace fastenc {

// A weight packed as panels.h says.
struct PackedLinear {
  const float* panels;
  const float* bias;
  int64_t depth, columns;
};

struct LayerAttention {
  PackedLinear qkv;
  int64_t num_heads;
  const int32_t* offsets;  // of all sequences
  int64_t max_seqlen;
};

struct LayerAfterAttention {
  PackedLinear attention_out, up, down;
  const float *attention_norm_weight, *attention_norm_bias, *out_norm_weight, *out_norm_bias;
  float eps;
  Activation activation;  // gelu or gelu_tanh
};

constexpr int64_t kInnerColumns = 256;  // of the inner activations that exist at a time

// Floats for so many rows.
int64_t layer_attention_scratch(const LayerAttention&, int64_t rows);
int64_t layer_after_attention_scratch(const LayerAfterAttention&, int64_t rows);

// All columns are multiples of 16. x, mixed and y hold every row.
FASTENC_FOR_EACH_ISA(
    void layer_attention(
        const LayerAttention&, const float* x, float* mixed, int64_t first_sequence, int64_t last_sequence,
        float* scratch);
    void layer_after_attention(
        const LayerAfterAttention&, const float* mixed, const float* x, float* y, int64_t first, int64_t last,
        float* scratch);)

}  // namespace fastenc
