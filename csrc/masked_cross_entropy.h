// Softmax cross-entropy of some rows of a logits matrix, with its gradient in the same pass.
#pragma once
#include <cstdint>

#include "isa.h"

#if defined(__CUDACC__)
#define FASTENC_HOST_DEVICE __host__ __device__
#else
#define FASTENC_HOST_DEVICE
#endif

namespace fastenc {

struct MaskedCrossEntropy {
  const void* logits;     // (rows, vocabulary), each row contiguous
  int64_t row_stride;     // elements from a row to the next, of the logits and of their gradient
  const int64_t* labels;  // (rows,)
  int64_t ignore_index;
  int64_t vocabulary;
  float label_smoothing, z_loss;
  const int64_t* divisor;  // the gradient is divided by it; or null
  float* losses;           // (rows,)
  void* dlogits;           // or null; may be `logits` itself
};

// Statistics of a row, relative to its maximum: a log-sum-exp would be rounded where the maximum is large.
struct SoftmaxStatistics {
  float row_max;         // the largest logit
  float log_row_sum;  // log of the sum of exp(x_j - row_max)
  float inverse;      // 1 / that sum
  float mean;         // of the logits; read with label smoothing only
  float target;       // x_label - row_max
  float target_exp;   // exp of that
};

// The loss of a row, and its gradient: dx_j = factor * exp(x_j - row_max) - everywhere, but dx_label = at_label.
struct RowTerms {
  float loss, factor, everywhere, at_label;
};

// dx_j = scale * (p_j * (1 + 2 * z_loss * lse) - label_smoothing / n), minus scale * (1 - label_smoothing) at the
// label.
// Static, because every instruction set compiles a copy.
FASTENC_HOST_DEVICE static inline RowTerms row_terms(const MaskedCrossEntropy& a, const SoftmaxStatistics& s, float scale) {
  const float n = (float)a.vocabulary, lse = s.row_max + s.log_row_sum, from_z = 2.f * a.z_loss * lse;
  RowTerms terms;
  terms.loss = s.log_row_sum - s.target;
  if (a.label_smoothing > 0.f)
    terms.loss = (1.f - a.label_smoothing) * terms.loss + a.label_smoothing * (s.log_row_sum - (s.mean - s.row_max));
  if (a.z_loss > 0.f) terms.loss += a.z_loss * lse * lse;
  terms.factor = scale * s.inverse * (1.f + from_z);
  terms.everywhere = scale * a.label_smoothing / n;
  const float p = s.target_exp * s.inverse;
  terms.at_label = scale * ((p - 1.f) + a.label_smoothing * ((n - 1.f) / n) + p * from_z);
  return terms;
}

FASTENC_FOR_EACH_ISA(
    void masked_cross_entropy(const MaskedCrossEntropy&, bool bf16, int64_t row);
    void scale_row(void* row, bool bf16, int64_t width, float factor);)

}  // namespace fastenc
