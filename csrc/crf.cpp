#include "crf.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "sequences.h"

namespace fastenc {
namespace {

constexpr const char* kOp = "crf";
constexpr int64_t kWidestVector = 16;
// The largest difference between transitions for which the recursion uses probabilities. Alphas are exact down to 1e-38
// of their sum. Within this range the rest of a path weighs at most e^60 = 1e26 times as much after one tag as after
// another, so an alpha that underflows cannot matter.
constexpr float kRange = 60.f;

bool within_range(const float* values, int64_t count) {
  const auto [low, high] = std::minmax_element(values, values + count);
  return count == 0 || (std::isfinite(*low) && std::isfinite(*high) && *high - *low <= kRange);
}

// The parameters as a kernel reads them, and their transposed and padded copies.
class Prepared {
 public:
  Prepared(const Tensor& emissions, const Tensor& start, const Tensor& end, const Tensor& transitions, bool viterbi)
      : emissions_(as_contiguous(emissions)), start_(start), end_(end), transitions_(transitions) {
    Crf& a = arguments;
    a.emissions = static_cast<const float*>(emissions_.const_data_ptr());
    a.start = start_.data();
    a.end = end_.data();
    a.transitions = transitions_.data();
    const int64_t tags = a.num_tags = emissions.size(1);
    a.stride = (tags + kWidestVector - 1) / kWidestVector * kWidestVector;
    a.logarithms = viterbi || !within_range(a.transitions, tags * tags) || !within_range(a.end, tags);
    a.top = a.logarithms || !tags ? 0.f : *std::max_element(a.transitions, a.transitions + tags * tags);
    const float padding = a.logarithms ? -std::numeric_limits<float>::infinity() : 0.f;
    from_rows_.assign(tags * a.stride, padding);
    to_rows_.assign(tags * a.stride, padding);
    for (int64_t i = 0; i < tags; ++i)
      for (int64_t j = 0; j < tags; ++j) {
        const float raw = a.transitions[i * tags + j];
        from_rows_[i * a.stride + j] = to_rows_[j * a.stride + i] = a.logarithms ? raw : std::exp(raw - a.top);
      }
    a.from_rows = from_rows_.data();
    a.to_rows = to_rows_.data();
  }

  Crf arguments{};

 private:
  Tensor emissions_;
  FloatVector start_, end_, transitions_;
  std::vector<float> from_rows_, to_rows_;
};

// Uninitialised.
using Scratch = std::unique_ptr<float[]>;
Scratch floats(int64_t count) { return Scratch(new float[count]); }

// Where the sequences begin, and how many tokens of each are used: all of them without `seqused`.
class Sequences {
 public:
  Sequences(const Tensor& cu_seqlens, const std::optional<Tensor>& seqused, int64_t tokens)
      : offsets_(as_contiguous(cu_seqlens)) {
    offset_ = checked_offsets(kOp, offsets_, tokens, tokens);
    count = offsets_.numel() - 1;
    if (seqused) used_ = checked_lengths(lengths_.emplace(as_contiguous(*seqused)));
  }
  int64_t first(int64_t s) const { return offset_[s]; }
  int64_t next(int64_t s) const { return offset_[s + 1]; }
  int64_t length(int64_t s) const { return used_ ? used_[s] : next(s) - first(s); }

  // The path that is given, a tag for each used token.
  const int64_t* checked_tags(const Tensor& tags, int64_t num_tags) const {
    STD_TORCH_CHECK(tags.scalar_type() == ScalarType::Long, kOp, ": tags must be int64");
    const auto* values = static_cast<const int64_t*>(tags.const_data_ptr());
    for (int64_t s = 0; s < count; ++s)
      for (int64_t token = first(s); token < first(s) + length(s); ++token)
        STD_TORCH_CHECK(
            values[token] >= 0 && values[token] < num_tags, kOp, ": tags must be in [0, ", num_tags, "), got ",
            values[token]);
    return values;
  }

  // Groups of sequences of similar lengths, the longest first; without `together` each group is one sequence.
  std::vector<CrfGroup> groups(bool together) const {
    const int64_t most = together ? CrfGroup::kMost : 1;
    std::vector<int64_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length(a) > length(b); });
    std::vector<CrfGroup> result((count + most - 1) / most, CrfGroup{});
    for (int64_t i = 0; i < count; ++i) {
      CrfGroup& group = result[i / most];
      const int64_t s = order[i], index = group.count++;
      group.sequence[index] = s;
      group.first[index] = first(s);
      group.length[index] = length(s);
    }
    return result;
  }
  // Fills the rows of tokens that are not used with 0.
  template <class T>
  void clear_unused(T* rows, int64_t width) const {
    for (int64_t s = 0; s < count; ++s) std::fill(rows + (first(s) + length(s)) * width, rows + next(s) * width, T(0));
  }

  int64_t count;

 private:
  const int32_t* checked_lengths(const Tensor& seqused) const {
    STD_TORCH_CHECK(
        seqused.scalar_type() == ScalarType::Int && seqused.numel() == count, kOp,
        ": seqused must be int32, one number a sequence");
    const auto* used = static_cast<const int32_t*>(seqused.const_data_ptr());
    for (int64_t s = 0; s < count; ++s)
      STD_TORCH_CHECK(
          used[s] >= 0 && used[s] <= next(s) - first(s), kOp, ": seqused must be from 0 to each sequence's length, got ",
          used[s], " of ", next(s) - first(s));
    return used;
  }

  Tensor offsets_;
  std::optional<Tensor> lengths_;
  const int32_t *offset_, *used_ = nullptr;
};

// (log-likelihood of each sequence, alphas, norms)
std::tuple<Tensor, Tensor, Tensor> forward(
    Tensor emissions, Tensor tags, Tensor cu_seqlens, std::optional<Tensor> seqused, Tensor start, Tensor end,
    Tensor transitions) {
  Prepared prepared(emissions, start, end, transitions, false);
  const Sequences sequences(cu_seqlens, seqused, emissions.size(0));
  Crf& a = prepared.arguments;
  tags = as_contiguous(tags);
  a.tags = sequences.checked_tags(tags, a.num_tags);
  Tensor result = empty({sequences.count}, ScalarType::Float);
  Tensor alphas = empty({emissions.size(0), a.stride}, ScalarType::Float);
  Tensor norms = empty({emissions.size(0)}, ScalarType::Float);
  a.alphas = static_cast<float*>(alphas.mutable_data_ptr());
  a.norms = static_cast<float*>(norms.mutable_data_ptr());
  float* likelihoods = static_cast<float*>(result.mutable_data_ptr());
  std::fill_n(likelihoods, sequences.count, 0.f);
  sequences.clear_unused(a.alphas, a.stride);
  sequences.clear_unused(a.norms, 1);
  const bool fills_lanes = crf_fills_lanes(a, false);
  if (fills_lanes)  // the kernel writes only the tags' columns; this fills the padding
    for (int64_t token = 0; token < emissions.size(0); ++token)
      std::fill(a.alphas + token * a.stride + a.num_tags, a.alphas + (token + 1) * a.stride, 0.f);
  const auto groups = sequences.groups(fills_lanes);
  torch::stable::parallel_for(0, groups.size(), 1, [&](int64_t begin, int64_t stop) {
    const Scratch scratch = floats(3 * CrfGroup::kMost * a.stride + 16);
    for (int64_t g = begin; g < stop; ++g) FASTENC_CALL(crf_forward, a, groups[g], likelihoods, scratch.get());
  });
  return {result, alphas, norms};
}

// Gradients of the weighted sum of log-likelihoods: (demissions, dstart, dend, dtransitions).
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    Tensor weights, Tensor emissions, Tensor tags, Tensor cu_seqlens, std::optional<Tensor> seqused, Tensor start,
    Tensor end, Tensor transitions, Tensor alphas, Tensor norms) {
  Prepared prepared(emissions, start, end, transitions, false);
  const Sequences sequences(cu_seqlens, seqused, emissions.size(0));
  Crf& a = prepared.arguments;
  tags = as_contiguous(tags);
  weights = as_contiguous(weights);
  a.tags = sequences.checked_tags(tags, a.num_tags);
  a.alphas = static_cast<float*>(alphas.mutable_data_ptr());
  a.norms = static_cast<float*>(norms.mutable_data_ptr());
  const int64_t num_tags = a.num_tags, stride = a.stride;
  Tensor demissions = empty({emissions.size(0), num_tags}, ScalarType::Float);
  float* de = static_cast<float*>(demissions.mutable_data_ptr());
  const float* weight = static_cast<const float*>(weights.const_data_ptr());

  sequences.clear_unused(de, num_tags);
  const auto groups = sequences.groups(crf_fills_lanes(a, false));
  // A fixed number of shares, so that the order of the sums does not depend on the number of threads.
  const int64_t shares = std::min<int64_t>(groups.size(), 16);
  const int64_t matrix = num_tags * stride, size = matrix + 2 * stride;
  std::vector<float> sums(shares * size, 0.f);
  torch::stable::parallel_for(0, shares, 1, [&](int64_t begin, int64_t stop) {
    const Scratch scratch = floats((4 * CrfGroup::kMost + 1) * stride + CrfGroup::kMost * num_tags * num_tags + 16);
    for (int64_t share = begin; share < stop; ++share) {
      float *pairs = sums.data() + share * size, *dstart = pairs + matrix, *dend = dstart + stride;
      for (int64_t g = groups.size() * share / shares; g < (int64_t)groups.size() * (share + 1) / shares; ++g)
        FASTENC_CALL(crf_backward, a, groups[g], weight, de, dstart, dend, pairs, scratch.get());
    }
  });
  Tensor total_start = empty({num_tags}, ScalarType::Float), total_end = empty({num_tags}, ScalarType::Float);
  Tensor total_transitions = empty({num_tags, num_tags}, ScalarType::Float);
  const auto sum_at = [&](int64_t index) {
    float value = 0.f;
    for (int64_t share = 0; share < shares; ++share) value += sums[share * size + index];
    return value;
  };
  auto* ds = static_cast<float*>(total_start.mutable_data_ptr());
  auto* dn = static_cast<float*>(total_end.mutable_data_ptr());
  auto* dt = static_cast<float*>(total_transitions.mutable_data_ptr());
  for (int64_t j = 0; j < num_tags; ++j) {
    ds[j] = sum_at(matrix + j);
    dn[j] = sum_at(matrix + stride + j);
    for (int64_t i = 0; i < num_tags; ++i) {
      const int64_t index = i * stride + j;
      dt[i * num_tags + j] = -sum_at(index) * (a.logarithms ? 1.f : a.from_rows[index]);
    }
  }
  return {demissions, total_start, total_end, total_transitions};
}

// (best tag of each token, score of each sequence's path)
std::tuple<Tensor, Tensor> viterbi(
    Tensor emissions, Tensor cu_seqlens, std::optional<Tensor> seqused, Tensor start, Tensor end, Tensor transitions) {
  Prepared prepared(emissions, start, end, transitions, true);
  const Sequences sequences(cu_seqlens, seqused, emissions.size(0));
  const Crf& a = prepared.arguments;
  Tensor path = empty({emissions.size(0)}, ScalarType::Long);
  Tensor scores = empty({sequences.count}, ScalarType::Float);
  auto* tags = static_cast<int64_t*>(path.mutable_data_ptr());
  float* score = static_cast<float*>(scores.mutable_data_ptr());
  std::fill_n(score, sequences.count, 0.f);
  sequences.clear_unused(tags, 1);
  const auto groups = sequences.groups(crf_fills_lanes(a, true));
  torch::stable::parallel_for(0, groups.size(), 1, [&](int64_t begin, int64_t stop) {
    // The first group of a thread's share has the longest sequence.
    const int64_t rows = groups[begin].length[0] + 1;
    const Scratch scratch = floats((3 * CrfGroup::kMost + rows * CrfGroup::kMost / 2) * a.stride + 16);
    for (int64_t g = begin; g < stop; ++g) FASTENC_CALL(crf_viterbi, a, groups[g], tags, score, scratch.get());
  });
  return {path, scores};
}

// (the n best paths (n, tokens), their scores (n, batch)); an empty sequence has one path, of score 0
std::tuple<Tensor, Tensor> nbest(
    Tensor emissions, Tensor cu_seqlens, Tensor start, Tensor end, Tensor transitions, int64_t n) {
  Prepared prepared(emissions, start, end, transitions, true);
  const Sequences sequences(cu_seqlens, std::nullopt, emissions.size(0));
  const Crf& a = prepared.arguments;
  const int64_t tokens = emissions.size(0), count = sequences.count;
  Tensor paths = empty({n, tokens}, ScalarType::Long);
  Tensor scores = empty({n, count}, ScalarType::Float);
  auto* tags = static_cast<int64_t*>(paths.mutable_data_ptr());
  float* score = static_cast<float*>(scores.mutable_data_ptr());
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t stop) {
    std::vector<float> scratch;
    for (int64_t s = begin; s < stop; ++s) {
      const int64_t first = sequences.first(s), length = sequences.length(s);
      if (!length) {
        for (int64_t k = 0; k < n; ++k)
          score[k * count + s] = k ? -std::numeric_limits<float>::infinity() : 0.f;
        continue;
      }
      scratch.resize(std::max<size_t>(scratch.size(), (length + 1) * n * a.stride));
      FASTENC_CALL(crf_nbest, a, first, length, n, tags + first, tokens, score + s, count, scratch.data());
    }
  });
  return {paths, scores};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("crf_fwd", TORCH_BOX(&forward));
  m.impl("crf_bwd", TORCH_BOX(&backward));
  m.impl("crf_viterbi", TORCH_BOX(&viterbi));
  m.impl("crf_nbest", TORCH_BOX(&nbest));
}

}  // namespace fastenc
