// Runs kernels of every instruction set that this processor has against sums in double, without torch: for processors
// that only an emulator offers, where torch itself may not run (release/kernels_aarch64.sh).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "attention.h"
#include "bias_gelu.h"
#include "dtype.h"
#include "gemm.h"
#include "isa.h"
#include "layer_norm.h"

using namespace fastenc;

namespace {

std::mt19937 generator(0);
int failures = 0;

float as_float(bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Values that bfloat16 holds exactly, stored in both types.
struct Values {
  std::vector<float> wide;
  std::vector<bfloat16> narrow;
  explicit Values(size_t count) : wide(count), narrow(count) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < count; ++i) {
      const float value = normal(generator);
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      narrow[i].bits = static_cast<uint16_t>(bits >> 16);
      wide[i] = as_float(narrow[i]);
    }
  }
  const void* data(bool bf16) const { return bf16 ? static_cast<const void*>(narrow.data()) : wide.data(); }
};

// A kernel's output in either type.
struct Output {
  std::vector<float> wide;
  std::vector<bfloat16> narrow;
  bool bf16;
  Output(size_t count, bool bf16_) : wide(count, NAN), narrow(count, bfloat16{0x7fc0}), bf16(bf16_) {}
  void* data() { return bf16 ? static_cast<void*>(narrow.data()) : wide.data(); }
  float at(size_t i) const { return bf16 ? as_float(narrow[i]) : wide[i]; }
};

// Fails if an element is off by more than `share` of the largest value; NaN fails too.
void compare(const std::string& what, const Output& got, const std::vector<double>& wanted, double share) {
  double error = 0, top = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double off = std::abs(got.at(i) - wanted[i]);
    error = off > error || off != off ? off : error;
    top = std::max(top, std::abs(wanted[i]));
  }
  const bool holds = error <= share * top;
  failures += !holds;
  std::printf("%-9s %-28s error %.1e of %.1e %s\n", isa_name(isa()), what.c_str(), error / top, share, holds ? "" : "FAILED");
}

double rounding(bool bf16) { return bf16 ? 1.0 / 256 : 2e-6; }

void check_layer_norm(bool bf16) {
  const int64_t rows = 5, width = 84;  // not a multiple of a vector's lanes times the unrolling
  const Values x(rows * width), weight(width), bias(width);
  Output y(rows * width, bf16);
  std::vector<float> scratch(4 * 128);
  LayerNormForward norm{};
  norm.x = x.data(bf16), norm.weight = weight.wide.data(), norm.bias = bias.wide.data();
  norm.y = y.data(), norm.width = width, norm.eps = 1e-5f;
  FASTENC_CALL(layer_norm_forward, norm, bf16, 0, rows, scratch.data());
  std::vector<double> wanted(rows * width);
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = x.wide.data() + r * width;
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < width; ++c) mean += row[c] / static_cast<double>(width);
    for (int64_t c = 0; c < width; ++c) variance += (row[c] - mean) * (row[c] - mean) / width;
    for (int64_t c = 0; c < width; ++c)
      wanted[r * width + c] = (row[c] - mean) / std::sqrt(variance + 1e-5) * weight.wide[c] + bias.wide[c];
  }
  compare(bf16 ? "layer_norm bfloat16" : "layer_norm float32", y, wanted, rounding(bf16));
}

void check_bias_gelu(bool bf16, Activation activation) {
  const int64_t rows = 4, width = 50;
  const Values x(rows * width), bias(width);
  Output y(rows * width, bf16);
  BiasGelu gelu{};
  gelu.x = x.data(bf16), gelu.bias = bias.wide.data(), gelu.out = y.data(), gelu.width = width;
  gelu.activation = activation;
  FASTENC_CALL(bias_gelu_forward, gelu, bf16, 0, rows);
  std::vector<double> wanted(rows * width);
  for (int64_t i = 0; i < rows * width; ++i) {
    const double u = x.wide[i] + static_cast<double>(bias.wide[i % width]);
    wanted[i] = activation == Activation::gelu
                    ? u * 0.5 * (1 + std::erf(u * std::sqrt(0.5)))
                    : u * 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (u + 0.044715 * u * u * u)));
  }
  const std::string form = activation == Activation::gelu ? "gelu" : "gelu_tanh";
  compare(form + (bf16 ? " bfloat16" : " float32"), y, wanted, rounding(bf16));
}

std::vector<double> product(const Values& a, const Values& w, const Values& bias, int64_t rows, int64_t columns, int64_t depth) {
  std::vector<double> wanted(rows * columns);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      double sum = bias.wide[c];
      for (int64_t k = 0; k < depth; ++k)
        sum += static_cast<double>(a.wide[r * depth + k]) * w.wide[c * depth + k];
      wanted[r * columns + c] = sum;
    }
  return wanted;
}

void check_products() {
  const int64_t rows = 13, columns = 75, depth = 131;
  const Values a(rows * depth), w(columns * depth), bias(columns);
  const std::vector<double> wanted = product(a, w, bias, rows, columns, depth);
  for (const bool bf16 : {false, true}) {
    std::vector<const void*> starts;
    for (int64_t c = 0; c < columns; ++c)
      starts.push_back(static_cast<const char*>(w.data(bf16)) + c * depth * (bf16 ? 2 : 4));
    const WeightRows weight{starts.data(), columns, depth, bf16};
    const std::string dtype = bf16 ? " bfloat16" : " float32";

    std::vector<float> packed(packed_floats(columns, depth));
    const int64_t panel = panel_columns(isa());
    for (int64_t group = 0; group * panel < columns; ++group) FASTENC_CALL(pack_panel_group, weight, group, packed.data());
    Output c(rows * columns, false);
    Gemm m{};
    m.a = a.wide.data(), m.a_row = depth, m.a_depth = 1, m.packed_b = packed.data(), m.bias = bias.wide.data();
    m.c = c.wide.data(), m.rows = rows, m.columns = columns, m.depth = depth;
    for (int64_t left = 0; left < columns; left += kGemmColumns)
      FASTENC_CALL(gemm_block, m, 0, rows, left, std::min(left + kGemmColumns, columns));
    compare("packed weight" + dtype, c, wanted, rounding(false));

    for (const bool pairs : {false, true}) {
      if (pairs && !(bf16 && isa() == Isa::neon_bf16)) continue;
      Output few(rows * columns, false);
      GemmFewRows product{};
      product.a = a.data(pairs), product.a_bf16 = pairs, product.a_row = depth, product.weight = weight;
      product.bias = bias.wide.data(), product.c = few.wide.data(), product.rows = rows;
      std::vector<float> turned(few_rows_floats(product));
      if (pairs) {
#if FASTENC_ARM
        neon_bf16::gemm_pairs(product, 0, columns);
#endif
      } else {
        FASTENC_CALL(pack_few_rows, product, turned.data());
        FASTENC_CALL(gemm_few_rows, product, turned.data(), 0, columns);
      }
      compare("few rows" + dtype + (pairs ? " in pairs" : ""), few, wanted, rounding(false));
    }
  }
}

void check_attention(bool bf16) {
  const int64_t length = 53, heads = 2, dim = 32, width = heads * dim;
  const Values q(length * width), k(length * width), v(length * width);
  Output out(length * width, bf16);
  std::vector<float> scratch(1 << 18), lse(heads * length);
  Attention a{};
  a.q = {q.data(bf16), width, dim}, a.k = {k.data(bf16), width, dim}, a.v = {v.data(bf16), width, dim};
  a.num_heads = heads, a.head_dim = dim, a.total_q = length, a.scale = 0.2f, a.out = out.data(), a.lse = lse.data();
  std::vector<double> wanted(length * width), p(length);
  for (int64_t head = 0; head < heads; ++head) {
    FASTENC_CALL(attention_forward, a, bf16, AttentionTask{0, length, 0, length, head}, scratch.data());
    for (int64_t i = 0; i < length; ++i) {
      double total = 0;
      for (int64_t j = 0; j < length; ++j) {
        double score = 0;
        for (int64_t d = 0; d < dim; ++d)
          score += static_cast<double>(q.wide[i * width + head * dim + d]) * k.wide[j * width + head * dim + d];
        total += p[j] = std::exp(0.2 * score);
      }
      for (int64_t d = 0; d < dim; ++d)
        for (int64_t j = 0; j < length; ++j)
          wanted[i * width + head * dim + d] += p[j] / total * v.wide[j * width + head * dim + d];
    }
  }
  compare(bf16 ? "attention bfloat16" : "attention float32", out, wanted, rounding(bf16));
}

}  // namespace

int main() {
  std::istringstream names(usable_isas());
  for (std::string name; names >> name;) {
    set_isa(name.c_str());
    for (const bool bf16 : {false, true}) {
      check_layer_norm(bf16);
      check_bias_gelu(bf16, Activation::gelu);
      check_bias_gelu(bf16, Activation::gelu_tanh);
      check_attention(bf16);
    }
    check_products();
  }
  std::printf("%s: %d failed\n", usable_isas(), failures);
  return failures != 0;
}
