// Linear-chain conditional random field:  P(y) = exp(start[y_0] + sum_t e_t[y_t] + sum_t T[y_{t-1}, y_t] + end[y_L]) / Z
// by the forward-backward recursion; the best paths by Viterbi's.
#pragma once
#include <cstdint>

#include "isa.h"

namespace fastenc {

struct Crf {
  const float* emissions;  // (tokens, num_tags)
  const int64_t* tags;     // (tokens,), the given path; not read by Viterbi
  const float* start;      // (num_tags,)
  const float* end;        // (num_tags,)
  const float* transitions;  // (num_tags, num_tags), from row to column
  int64_t num_tags;
  int64_t stride;  // num_tags rounded up to whole vectors; the rows below have that length
  // As probabilities: exp(transition - top), padded with 0. As logarithms: the transitions, padded with -infinity.
  bool logarithms;
  float top;
  const float* from_rows;  // (num_tags, stride), row i: from i to every tag
  const float* to_rows;    // (num_tags, stride), row j: from every tag to j
  float* alphas;           // (tokens, stride): probability, or its logarithm, of the tag given the tokens so far
  float* norms;            // (tokens,): what the recursion was divided by, or its logarithm
};

FASTENC_FOR_EACH_ISA(
    // Fills the sequence's alphas and norms; writes its log-likelihood.
    void crf_forward(const Crf&, int64_t first, int64_t length, float* log_likelihood);
    // Gradients of weight * log-likelihood: writes demissions (length, num_tags), adds to the others. A transition's
    // gradient is what the given path steps less what is expected: steps - pairs, or steps - pairs * from_rows as
    // probabilities, (num_tags, stride) each. Scratch holds 3 * stride floats.
    void crf_backward(
        const Crf&, int64_t first, int64_t length, float weight, float* demissions, float* dstart, float* dend,
        float* steps, float* pairs, float* scratch);
    // scratch holds (length + 1) * stride floats.
    void crf_viterbi(const Crf&, int64_t first, int64_t length, int64_t* path, float* score, float* scratch);
    // The n best paths, best first: path k at paths + k * path_stride, its score at scores + k * score_stride; -1 and
    // -infinity where there are fewer. scratch holds (length + 1) * n * stride floats.
    void crf_nbest(
        const Crf&, int64_t first, int64_t length, int64_t n, int64_t* paths, int64_t path_stride, float* scores,
        int64_t score_stride, float* scratch);)

}  // namespace fastenc
