// Linear-chain conditional random field: P(y) = exp(start[y_0] + sum_t e_t[y_t] + sum_t T[y_{t-1}, y_t] + end[y_L]) / Z
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
  // from_rows and to_rows hold exp(transition - top), padded with 0; with `logarithms`, the transitions, padded with
  // -infinity.
  bool logarithms;
  float top;
  const float* from_rows;  // (num_tags, stride), row i: from i to every tag
  const float* to_rows;    // (num_tags, stride), row j: from every tag to j
  float* alphas;           // (tokens, stride): probability, or its logarithm, of the tag given the tokens so far
  float* norms;            // (tokens,): the divisor that normalised the alphas, or its logarithm
};

// Sequences that a kernel computes together, longest first; the last ones may be empty. Sequence i's log-likelihood and
// its other values are at index sequence[i].
struct CrfGroup {
  static constexpr int kMost = 16;  // lanes of the widest vectors
  int64_t count, sequence[kMost], first[kMost], length[kMost];
};
// Whether a vector's lanes hold different sequences. Otherwise they hold the tags of one sequence: faster for many
// tags.
inline bool crf_fills_lanes(const Crf& a, bool viterbi) { return a.num_tags <= 128 && (viterbi || !a.logarithms); }

FASTENC_FOR_EACH_ISA(
    // Writes alphas, norms and log-likelihoods of the sequences; of an empty one, nothing.
    // scratch holds 3 * 16 * stride + 16 floats.
    void crf_forward(const Crf&, const CrfGroup&, float* log_likelihoods, float* scratch);
    // Gradients of sum(weights * log_likelihoods). Writes the sequences' rows of demissions (tokens, num_tags) and
    // accumulates into the others. A transition's gradient is its count in the given path minus its expected count:
    // -pairs, (num_tags, stride), or with probabilities -pairs * from_rows. The counts are subtracted step by step:
    // both may be large, and a difference of the totals would lose digits.
    // scratch holds 4 * 16 * stride + stride + 16 * num_tags^2 + 16 floats.
    void crf_backward(
        const Crf&, const CrfGroup&, const float* weights, float* demissions, float* dstart, float* dend,
        float* pairs, float* scratch);
    // Writes the sequences' best paths (tokens,) and their scores. scratch holds 3 * 16 * stride + 16 floats and
    // (longest + 1) * 8 * stride more.
    void crf_viterbi(const Crf&, const CrfGroup&, int64_t* paths, float* scores, float* scratch);
    // The n best paths, best first: path k at paths + k * path_stride, its score at scores + k * score_stride; -1 and
    // -infinity where there are fewer. scratch holds (length + 1) * n * stride floats.
    void crf_nbest(
        const Crf&, int64_t first, int64_t length, int64_t n, int64_t* paths, int64_t path_stride, float* scores,
        int64_t score_stride, float* scratch);)

}  // namespace fastenc
