// The products of bfloat16 by AMX and by AVX512-BF16, the attention and the layer made of them, with the instructions in
// plain C++: beside sums in double of the same rounded operands. Exits with 1 and says what is wrong.
#include "emulated_intrinsics.h"
//
#include <cstdio>
#include <random>
#include <vector>

#include "attention.h"
#include "dropout.h"
#include "dtype.h"
#include "encoder_layer.h"
#include "gemm.h"
#include "rotary.h"

#define FASTENC_VECTOR_BYTES 64
#define FASTENC_MULTIPLY_TILES(sums, a, b) _tile_dpbf16ps(sums, a, b)

namespace fastenc {
static bool by_amx = true;  // else by AVX512-BF16
bool has_bf16_tiles() { return by_amx; }
}  // namespace fastenc

namespace fastenc::avx512 {
namespace {  // what is not used is not compiled

#include "cpu/vec.h"
#include "cpu/normal_cdf.h"
//
#include "cpu/activation.h"
#include "cpu/dropout.h"
#include "cpu/tiles.h"
#include "cpu/amx_tiles.h"
#include "cpu/bf16_panels.h"
#include "cpu/bf16_linear_amx.h"
#include "cpu/rotary.h"
#include "cpu/attention_operands.h"
#include "cpu/disentangled_attention.h"
//
#include "cpu/attention.h"
#include "cpu/attention_bf16.h"
#include "cpu/layer_norm.h"
//
#include "cpu/encoder_layer.h"
#include "cpu/gemm.h"
#include "cpu/gemm_amx.h"
#include "cpu/gemm_pairs.h"

std::mt19937 engine(0);
std::vector<float> draw(int64_t count, float scale = 1.f) {
  std::normal_distribution<float> normal(0.f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(engine);
  return values;
}

double rounded(double x) { return emulated::widen(emulated::narrow((float)x)); }
std::vector<bfloat16> narrowed(const std::vector<float>& x) {
  std::vector<bfloat16> narrow;
  for (float value : x) narrow.push_back({emulated::narrow(value)});
  return narrow;
}

// A weight (columns, depth) of bfloat16, plain and packed.
struct Linear {
  std::vector<float> values, bias;
  std::vector<bfloat16> narrow;
  std::vector<const void*> starts;
  std::vector<float> packed;
  WeightRows rows;

  Linear(int64_t columns, int64_t depth)
      : values(draw(columns * depth, 0.1f)), bias(draw(columns)), narrow(narrowed(values)),
        packed(tile_weight_floats(columns, depth), NAN) {
    for (int64_t c = 0; c < columns; ++c) starts.push_back(narrow.data() + c * depth);
    rows = {starts.data(), columns, depth, true};
    for (int64_t group = 0; group * kTileColumns < columns; ++group) pack_tile_group(rows, group, packed.data());
  }
  Linear(const Linear&) = delete;
  LayerLinear of_layer() const { return {packed.data(), {}, bias.data(), rows.depth, rows.count}; }
  // Rounds what it multiplies.
  std::vector<double> times(const std::vector<double>& x) const {
    std::vector<double> y;
    for (size_t row = 0; row * rows.depth < x.size(); ++row)
      for (int64_t c = 0; c < rows.count; ++c) {
        double sum = bias[c];
        for (int64_t k = 0; k < rows.depth; ++k)
          sum += rounded(x[row * rows.depth + k]) * rounded(values[c * rows.depth + k]);
        y.push_back(sum);
      }
    return y;
  }
};

int failures = 0;
template <class T>
void check_near(const char* what, const std::vector<T>& ours, const std::vector<double>& exact, double allowed) {
  double error = 0., size = 0.;
  for (size_t i = 0; i < exact.size(); ++i) {
    error += std::pow(to_float(ours[i]) - exact[i], 2);
    size += exact[i] * exact[i];
  }
  if (ours.size() == exact.size() && std::sqrt(error) <= allowed * std::sqrt(size)) return;
  std::printf("%s: an error of %g, %g allowed\n", what, std::sqrt(error / size), allowed);
  ++failures;
}
void check(const char* what, bool holds) {
  if (!holds) std::printf("%s does not hold\n", what), ++failures;
}
template <class T>
bool same_bits(const T* x, const T* y, int64_t count) { return !std::memcmp(x, y, count * sizeof(T)); }

void check_products(int64_t rows, int64_t depth, int64_t columns) {
  const Linear linear(columns, depth);
  const auto x = draw(rows * depth);
  const auto narrow = narrowed(x);
  auto multiply = [&](const void* a, bool bf16, int64_t first, int64_t last) {
    std::vector<float> operands(tile_rows_floats(last - first, depth)), c(rows * columns);
    const GemmTiles m{a, bf16, depth, linear.packed.data(), linear.bias.data(), c.data(), rows, columns, depth};
    fill_tile_rows(m, first, last, operands.data());
    for (int64_t left = 0; left < columns; left += kTileColumns)  // as threads share them
      gemm_tiles(m, operands.data(), first, last, left, left + kTileColumns < columns ? left + kTileColumns : columns);
    return c;
  };
  const auto c = multiply(x.data(), false, 0, rows);
  check_near("a product", c, linear.times({x.begin(), x.end()}), 1e-6);
  check("floats are rounded as bfloat16", same_bits(c.data(), multiply(narrow.data(), true, 0, rows).data(), c.size()));
  const auto last = multiply(x.data(), false, rows - 1, rows);
  check("a row has the same bits alone", same_bits(&c[c.size() - columns], &last[c.size() - columns], columns));
  std::vector<float> few(rows * columns);
  const GemmFewRows m{narrow.data(), true, depth, linear.rows, linear.bias.data(), few.data(), rows};
  std::vector<float> packed_rows(pair_rows_floats(rows, depth));
  pack_pair_rows(m, packed_rows.data());
  gemm_pairs(m, packed_rows.data(), 0, columns);
  check("few rows have the same bits", same_bits(c.data(), few.data(), c.size()));
}

// Queries, keys and values rounded as they enter products; probabilities are not.
std::vector<double> plain_attention(const Attention& a, int64_t first, int64_t length, int64_t head) {
  const int64_t dim = a.head_dim, radius = a.relative_radius, half = a.rotary_dim / 2;
  auto row = [&](const PackedHeads& x, int64_t token, int64_t of) {
    const float* from = (const float*)x.data + (first + token) * x.token_stride + of * x.head_stride;
    return std::vector<double>(from, from + dim);
  };
  auto prepared = [&](const PackedHeads& x, int64_t token, int64_t of, const float* norm, double factor) {
    std::vector<double> values = row(x, token, of);
    double squares = 0.;
    for (double value : values) squares += value * value;
    for (int64_t d = 0; d < dim; ++d)
      values[d] *= factor * (norm ? norm[d] / std::sqrt(squares / dim + a.head_norm_eps) : 1.);
    for (int64_t i = 0; i < half; ++i) {
      const float *angles = a.rotary + token * a.rotary_dim, cosine = angles[i], sine = angles[half + i];
      const double x1 = values[i], x2 = values[half + i];
      values[i] = x1 * cosine - x2 * sine;
      values[half + i] = x2 * cosine + x1 * sine;
    }
    return values;
  };
  std::vector<double> out;
  for (int64_t i = 0; i < length; ++i) {
    const auto q = prepared(a.q, i, head, a.query_norm, a.scale);
    std::vector<double> sums(dim);
    double total = 0.;
    for (int64_t j = 0; j < length; ++j) {
      const int64_t distance = j - i, clamped = distance < -radius ? -radius : distance > radius ? radius : distance;
      if ((a.window_left >= 0 && -distance > a.window_left) || (a.window_right >= 0 && distance > a.window_right)) continue;
      const auto k = prepared(a.k, j, head / a.group, a.key_norm, 1.), v = row(a.v, j, head / a.group);
      double score = a.relative_bias ? a.relative_bias[head * (2 * radius + 1) + radius + clamped] : 0.;
      if (a.key_bias) score += a.key_bias[first + j];
      for (int64_t d = 0; d < dim; ++d) score += rounded(q[d]) * rounded(k[d]);
      total += std::exp(score);
      for (int64_t d = 0; d < dim; ++d) sums[d] += std::exp(score) * rounded(v[d]);
    }
    for (double sum : sums) out.push_back(sum / total);
  }
  return out;
}

enum Extras { kNone, kWindow, kBiases, kRotary, kHeadNorms };

// What it points to lives as long as it does.
struct AttentionCase {
  Attention a{};
  std::vector<float> table, key_bias, angles, norm;

  AttentionCase(int64_t heads, int64_t group, int64_t dim, int64_t tokens, Extras extras)
      : table(draw(heads * 11)), key_bias(draw(tokens)), norm(draw(dim)) {
    a.num_heads = heads, a.group = group, a.head_dim = dim, a.total_q = tokens, a.scale = 1 / std::sqrt((float)dim);
    if (extras == kWindow) a.window_left = 9, a.window_right = 3;
    if (extras == kBiases) a.relative_bias = table.data(), a.relative_radius = 5, a.key_bias = key_bias.data();
    if (extras == kHeadNorms) a.query_norm = a.key_norm = norm.data(), a.head_norm_eps = 1e-6f;
    if (extras != kRotary) return;
    a.rotary_dim = 32;
    for (int64_t token = 0; token < tokens; ++token)
      for (int64_t i = 0; i < 32; ++i) {
        const double angle = (double)token * std::pow(1e4, -(i % 16) / 16.);
        angles.push_back((float)(i < 16 ? std::cos(angle) : std::sin(angle)));
      }
    a.rotary = angles.data();
  }
  AttentionCase(const AttentionCase&) = delete;
};

std::vector<float> scratch(int64_t floats) { return std::vector<float>(floats, NAN); }

int64_t head_scratch(int64_t length, int64_t dim) { return 4 * (length + 128) * (dim + 64) + 48 * (2 * length + 512); }

void check_attention(int64_t length, int64_t dim, Extras extras) {
  constexpr int64_t kHeads = 2, kFirst = 3;  // rows of another sequence lie before
  const int64_t tokens = kFirst + length, columns = (kHeads + 2) * dim;
  AttentionCase with(kHeads, 2, dim, tokens, extras);
  const auto qkv = draw(tokens * columns);
  Attention a = with.a;
  set_packed(a, qkv.data());
  for (int64_t head = 0; head < kHeads; ++head) {
    const auto exact = plain_attention(a, kFirst, length, head);
    auto run = [&](auto kernel, auto zero) {
      std::vector<decltype(zero)> out(tokens * kHeads * dim), part;
      a.out = out.data();
      auto room = scratch(head_scratch(length, dim));
      kernel({kFirst, length, kFirst, length, head}, room.data());
      for (int64_t i = kFirst; i < tokens; ++i)
        part.insert(part.end(), &out[(i * kHeads + head) * dim], &out[(i * kHeads + head) * dim] + dim);
      return part;
    };
    auto wide = [&](const AttentionTask& task, float* room) { attention_bf16(a, false, task, task.head + 1, room); };
    auto narrow = [&](const AttentionTask& task, float* room) { attention_bf16(a, true, task, task.head + 1, room); };
    const auto out = run(wide, 0.f);
    check_near("attention", out, exact, 0.003);
    const auto narrowed_out = run(narrow, bfloat16{}), expected = narrowed(out);
    check("results are rounded", same_bits(narrowed_out.data(), expected.data(), expected.size()));
  }
}

struct Norm {
  std::vector<float> weight, bias;
  explicit Norm(int64_t width) : weight(draw(width)), bias(draw(width)) {}
  LayerNormTerms terms() const { return {weight.data(), bias.data(), 1e-5f}; }
  std::vector<double> of(const std::vector<double>& x) const {
    std::vector<double> y;
    const size_t width = weight.size();
    for (size_t first = 0; first < x.size(); first += width) {
      double mean = 0., square = 0.;
      for (size_t c = 0; c < width; ++c) mean += x[first + c] / width;
      for (size_t c = 0; c < width; ++c) square += std::pow(x[first + c] - mean, 2) / width;
      for (size_t c = 0; c < width; ++c)
        y.push_back((x[first + c] - mean) / std::sqrt(square + 1e-5) * weight[c] + bias[c]);
    }
    return y;
  }
};

std::vector<double> widened(const std::vector<bfloat16>& x) {
  std::vector<double> wide;
  for (bfloat16 value : x) wide.push_back(to_float(value));
  return wide;
}
std::vector<double> sum(std::vector<double> x, const std::vector<double>& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  return x;
}

void check_layer(bool gated, bool pre_norm, int64_t inner) {
  constexpr int64_t kHidden = 80, kWidth = 64, kHeads = 2, kDim = 32;
  const std::vector<int32_t> offsets{0, 20, 20, 37, 50};
  const int64_t rows = offsets.back();
  const auto x = narrowed(draw(rows * kHidden));
  AttentionCase with(kHeads, 1, kDim, rows, kRotary);
  const Linear qkv(3 * kWidth, kHidden), out(kHidden, kWidth), up((gated ? 2 : 1) * inner, kHidden), down(kHidden, inner);
  const Norm norm1(kHidden), norm2(kHidden);

  LayerAttention attention{qkv.of_layer(), with.a, offsets.data(), true, true};
  std::vector<bfloat16> attended(rows * kWidth);
  auto room = scratch(100000);
  layer_attention(attention, x.data(), attended.data(), 0, 4, room.data());
  std::vector<float> projected;
  for (double value : qkv.times(widened(x))) projected.push_back((float)value);
  Attention a = with.a;
  set_packed(a, projected.data());
  std::vector<double> exact(rows * kWidth);
  for (int64_t s = 0; s < 4; ++s)
    for (int64_t head = 0; head < kHeads; ++head) {
      const int64_t first = offsets[s], length = offsets[s + 1] - first;
      const auto part = plain_attention(a, first, length, head);
      for (int64_t i = 0; i < length * kDim; ++i)
        exact[(first + i / kDim) * kWidth + head * kDim + i % kDim] = part[i];
    }
  check_near("a layer's attention", attended, exact, 0.004);

  LayerAfterAttention after{out.of_layer(), up.of_layer(), down.of_layer(), norm1.terms(), norm2.terms()};
  after.activation = gated ? Activation::silu : Activation::gelu;
  after.gated = gated, after.pre_norm = pre_norm, after.bf16 = after.pairs = true;
  auto run = [&](std::initializer_list<int64_t> bounds) {
    std::vector<bfloat16> y(rows * kHidden), next(rows * kHidden);
    for (const int64_t* end = bounds.begin() + 1; end != bounds.end(); ++end) {
      auto room = scratch(1000000);
      layer_after_attention(after, attended.data(), x.data(), y.data(), next.data(), end[-1], *end, room.data());
    }
    if (pre_norm) y.insert(y.end(), next.begin(), next.end());
    return y;
  };
  const auto whole = run({0, rows}), parts = run({0, 1, 17, rows});
  check("rows do not depend on their blocks", same_bits(whole.data(), parts.data(), whole.size()));
  const auto sums = sum(out.times(widened(attended)), widened(x)), h = norm1.of(sums);
  std::vector<double> activated;
  for (int64_t row = 0; row < rows; ++row) {
    const std::vector<double> u = up.times({&h[row * kHidden], &h[row * kHidden] + kHidden});
    for (int64_t c = 0; c < inner; ++c)
      activated.push_back(
          gated ? u[c] / (1 + std::exp(-u[c])) * u[inner + c] : u[c] * std::erfc(-u[c] / std::sqrt(2.)) / 2);
  }
  const auto next = sum(down.times(activated), pre_norm ? sums : h);
  auto y = norm2.of(next);
  if (pre_norm) y.insert(y.end(), next.begin(), next.end());
  check_near("a layer", whole, y, 0.004);
}

void check_all() {
  // Whole tiles and parts of them, in every dimension; more rows than the blocks of few rows have.
  for (int64_t rows : {1, 32, 45})
    for (auto [depth, columns] : {std::pair{64, 16}, {48, 80}, {100, 66}}) check_products(rows, depth, columns);
  check_products(110, 32, 32);
  for (Extras extras : {kNone, kWindow, kBiases, kRotary, kHeadNorms}) {
    check_attention(20, 64, extras);
    check_attention(70, 80, extras);
  }
  check_attention(1, 32, kNone);
  for (bool gated : {false, true})
    for (bool pre_norm : {false, true})
      for (int64_t inner : {(int64_t)48, kTileInnerColumns + 16}) check_layer(gated, pre_norm, inner);
}

}  // namespace

int emulate() {
  for (bool amx : {true, false}) {
    by_amx = amx;
    check_all();
    if (failures) return std::printf("by %s\n", amx ? "AMX" : "AVX512-BF16"), 1;
  }
  std::printf("near the sums in double\n");
  return 0;
}

}  // namespace fastenc::avx512

int main() { return fastenc::avx512::emulate(); }
