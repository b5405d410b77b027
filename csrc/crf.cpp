#include "crf.h"

#include <cmath>
#include <limits>

#include "tensors.h"

namespace fastenc {
namespace {

constexpr int64_t kWidestVector = 16;
// Within e^60 of each other, no weight is lost that could matter: alphas are exact down to 1e-38 of their sum, and a
// tag's future is at most e^60 = 1e26 times better than another's.
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

struct Offsets {
  explicit Offsets(const Tensor& cu_seqlens) : held(as_contiguous(cu_seqlens)) {
    STD_TORCH_CHECK(held.scalar_type() == ScalarType::Int, "crf: cu_seqlens must be int32");
    values = static_cast<const int32_t*>(held.const_data_ptr());
    sequences = held.numel() - 1;
  }
  int64_t first(int64_t s) const { return values[s]; }
  int64_t length(int64_t s) const { return values[s + 1] - values[s]; }

  Tensor held;
  const int32_t* values;
  int64_t sequences;
};

// (log-likelihood of each sequence, alphas, norms)
std::tuple<Tensor, Tensor, Tensor> forward(
    Tensor emissions, Tensor tags, Tensor cu_seqlens, Tensor start, Tensor end, Tensor transitions) {
  Prepared prepared(emissions, start, end, transitions, false);
  const Offsets offsets(cu_seqlens);
  Crf& a = prepared.arguments;
  tags = as_contiguous(tags);
  a.tags = static_cast<const int64_t*>(tags.const_data_ptr());
  Tensor result = empty({offsets.sequences}, ScalarType::Float);
  Tensor alphas = empty({emissions.size(0), a.stride}, ScalarType::Float);
  Tensor norms = empty({emissions.size(0)}, ScalarType::Float);
  a.alphas = static_cast<float*>(alphas.mutable_data_ptr());
  a.norms = static_cast<float*>(norms.mutable_data_ptr());
  float* likelihoods = static_cast<float*>(result.mutable_data_ptr());
  torch::stable::parallel_for(0, offsets.sequences, 1, [&](int64_t begin, int64_t stop) {
    for (int64_t s = begin; s < stop; ++s) {
      likelihoods[s] = 0.f;
      if (offsets.length(s)) FASTENC_CALL(crf_forward, a, offsets.first(s), offsets.length(s), likelihoods + s);
    }
  });
  return {result, alphas, norms};
}

// Gradients of the weighted sum of log-likelihoods: (demissions, dstart, dend, dtransitions).
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    Tensor weights, Tensor emissions, Tensor tags, Tensor cu_seqlens, Tensor start, Tensor end, Tensor transitions,
    Tensor alphas, Tensor norms) {
  Prepared prepared(emissions, start, end, transitions, false);
  const Offsets offsets(cu_seqlens);
  Crf& a = prepared.arguments;
  tags = as_contiguous(tags);
  weights = as_contiguous(weights);
  a.tags = static_cast<const int64_t*>(tags.const_data_ptr());
  a.alphas = static_cast<float*>(alphas.mutable_data_ptr());
  a.norms = static_cast<float*>(norms.mutable_data_ptr());
  const int64_t num_tags = a.num_tags, stride = a.stride;
  Tensor demissions = empty({emissions.size(0), num_tags}, ScalarType::Float);
  float* de = static_cast<float*>(demissions.mutable_data_ptr());
  const float* weight = static_cast<const float*>(weights.const_data_ptr());

  // A fixed number of blocks of sequences, so that the order of the sums does not depend on the threads.
  const int64_t blocks = std::min<int64_t>(offsets.sequences, 16), size = (num_tags + 5) * stride;
  std::vector<float> sums(blocks * size, 0.f);
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t stop) {
    for (int64_t block = begin; block < stop; ++block) {
      float* dtransitions = sums.data() + block * size;
      float *dstart = dtransitions + num_tags * stride, *dend = dstart + stride, *scratch = dend + stride;
      for (int64_t s = offsets.sequences * block / blocks; s < offsets.sequences * (block + 1) / blocks; ++s) {
        const int64_t first = offsets.first(s), length = offsets.length(s);
        if (length)
          FASTENC_CALL(
              crf_backward, a, first, length, weight[s], de + first * num_tags, dstart, dend, dtransitions, scratch);
      }
    }
  });
  Tensor total_start = empty({num_tags}, ScalarType::Float), total_end = empty({num_tags}, ScalarType::Float);
  Tensor total_transitions = empty({num_tags, num_tags}, ScalarType::Float);
  const auto add = [&](Tensor& into, int64_t rows, int64_t offset) {
    float* total = static_cast<float*>(into.mutable_data_ptr());
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < num_tags; ++j) {
        float value = 0.f;
        for (int64_t block = 0; block < blocks; ++block) value += sums[block * size + offset + i * stride + j];
        total[i * num_tags + j] = value;
      }
  };
  add(total_transitions, num_tags, 0);
  add(total_start, 1, num_tags * stride);
  add(total_end, 1, (num_tags + 1) * stride);
  return {demissions, total_start, total_end, total_transitions};
}

// (best tag of each token, score of each sequence's path)
std::tuple<Tensor, Tensor> viterbi(
    Tensor emissions, Tensor cu_seqlens, Tensor start, Tensor end, Tensor transitions) {
  Prepared prepared(emissions, start, end, transitions, true);
  const Offsets offsets(cu_seqlens);
  const Crf& a = prepared.arguments;
  Tensor path = empty({emissions.size(0)}, ScalarType::Long);
  Tensor scores = empty({offsets.sequences}, ScalarType::Float);
  auto* tags = static_cast<int64_t*>(path.mutable_data_ptr());
  float* score = static_cast<float*>(scores.mutable_data_ptr());
  torch::stable::parallel_for(0, offsets.sequences, 1, [&](int64_t begin, int64_t stop) {
    std::vector<float> scratch;
    for (int64_t s = begin; s < stop; ++s) {
      const int64_t first = offsets.first(s), length = offsets.length(s);
      score[s] = 0.f;
      if (!length) continue;
      scratch.resize(std::max<size_t>(scratch.size(), (length + 1) * a.stride));
      FASTENC_CALL(crf_viterbi, a, first, length, tags + first, score + s, scratch.data());
    }
  });
  return {path, scores};
}

// (the n best paths (n, tokens), their scores (n, batch)); an empty sequence has one path, of score 0
std::tuple<Tensor, Tensor> nbest(
    Tensor emissions, Tensor cu_seqlens, Tensor start, Tensor end, Tensor transitions, int64_t n) {
  Prepared prepared(emissions, start, end, transitions, true);
  const Offsets offsets(cu_seqlens);
  const Crf& a = prepared.arguments;
  const int64_t tokens = emissions.size(0), sequences = offsets.sequences;
  Tensor paths = empty({n, tokens}, ScalarType::Long);
  Tensor scores = empty({n, sequences}, ScalarType::Float);
  auto* tags = static_cast<int64_t*>(paths.mutable_data_ptr());
  float* score = static_cast<float*>(scores.mutable_data_ptr());
  torch::stable::parallel_for(0, sequences, 1, [&](int64_t begin, int64_t stop) {
    std::vector<float> scratch;
    for (int64_t s = begin; s < stop; ++s) {
      const int64_t first = offsets.first(s), length = offsets.length(s);
      if (!length) {
        for (int64_t k = 0; k < n; ++k)
          score[k * sequences + s] = k ? -std::numeric_limits<float>::infinity() : 0.f;
        continue;
      }
      scratch.resize(std::max<size_t>(scratch.size(), (length + 1) * n * a.stride));
      FASTENC_CALL(crf_nbest, a, first, length, n, tags + first, tokens, score + s, sequences, scratch.data());
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
