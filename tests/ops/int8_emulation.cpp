// The products of 8 bits by AVX512-VNNI, by AMX and by AVX-VNNI, with the instructions in plain C++: the same bits. Exits
// with 1 and says where they differ.
#include "emulated_intrinsics.h"
//
#include <cstdio>
#include <random>
#include <vector>

#define FASTENC_ISA avx512
#define FASTENC_VECTOR_BYTES 64
#include "cpu/int8_kernels.inc"
#undef FASTENC_ISA
#undef FASTENC_VECTOR_BYTES
#define FASTENC_ISA avx2
#define FASTENC_VECTOR_BYTES 32
#include "cpu/int8_kernels.inc"

bool uses_tiles = false;
bool fastenc::has_int8_tiles() { return uses_tiles; }

using namespace fastenc;

struct Operands {
  std::vector<char> weight, rows;
  Int8Rows quantised;
};

template <class Pack, class Quantise>
Operands operands(
    const WeightRows& w, const std::vector<float>& x, int64_t rows, int64_t width, Pack pack, Quantise quantise) {
  const Int8Groups groups(w.depth);
  const int64_t panels = (w.count + width - 1) / width;
  Operands o{
      std::vector<char>(panels * int8_panel_bytes(w.depth, width)), std::vector<char>(Int8Rows::bytes(rows, groups)),
      {nullptr, 0, nullptr, groups}};
  for (int64_t panel = 0; panel < panels; ++panel) pack(w, panel, o.weight.data());
  o.quantised = Int8Rows::in(o.rows.data(), rows, groups);
  quantise(x.data(), w.depth, 0, rows, o.quantised);
  return o;
}

int main() {
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  const int64_t shapes[][3] = {{1, 64, 16}, {37, 384, 80}, {16, 768, 64}, {50, 400, 112}, {33, 1024, 48}};
  for (const auto& [rows, depth, columns] : shapes) {
    std::vector<float> x(rows * depth), weight(columns * depth), bias(columns);
    for (auto* values : {&x, &weight, &bias})
      for (float& value : *values) value = normal(random);
    std::vector<const void*> starts;
    for (int64_t c = 0; c < columns; ++c) starts.push_back(weight.data() + c * depth);
    const WeightRows w{starts.data(), columns, depth, false};
    const Operands wide = operands(w, x, rows, 64, avx512::int8_pack, avx512::int8_quantise);
    const Operands narrow = operands(w, x, rows, 16, avx2::int8_pack, avx2::int8_quantise);
    auto multiply = [&](const Operands& o, auto kernel) {
      std::vector<float> c(rows * columns);
      const Int8Weight packed{o.weight.data(), bias.data(), depth, columns};
      kernel(Int8Product{o.quantised, packed, 0, rows, 0, columns, c.data(), columns, false, packed.packed});
      return c;
    };
    const auto vnni = multiply(wide, avx512::int8_multiply);
    uses_tiles = true;
    const auto amx = multiply(wide, avx512::int8_multiply);
    uses_tiles = false;
    const auto avx_vnni = multiply(narrow, avx2::int8_multiply);
    const size_t bytes = vnni.size() * sizeof(float);
    const char* other = std::memcmp(vnni.data(), amx.data(), bytes)        ? "AMX"
                        : std::memcmp(vnni.data(), avx_vnni.data(), bytes) ? "AVX-VNNI"
                                                                           : nullptr;
    if (other) {
      std::printf("%s differs: %ld rows, depth %ld, %ld columns\n", other, rows, depth, columns);
      return 1;
    }
  }
  std::printf("the same bits\n");
}
