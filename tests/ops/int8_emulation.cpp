// The products of 8 bits by AVX512-VNNI, by AMX and by AVX-VNNI, with the instructions in plain C++, and by AVX2: the same
// bits as plain arithmetic on integers, in one product and in parts. Exits with 1 and says where they differ.
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
#define FASTENC_ISA avx_vnni
#define FASTENC_VECTOR_BYTES 32
#include "cpu/int8_kernels.inc"
#undef FASTENC_ISA
#define FASTENC_ISA avx2
#define FASTENC_INT8_PAIRS 1
#include "cpu/int8_kernels.inc"

bool uses_tiles = false;
bool fastenc::has_int8_tiles() { return uses_tiles; }

using namespace fastenc;

// The kernels of an instruction set.
struct Kernels {
  const char* name;
  bool tiles;
  int64_t width;  // columns of a panel
  void (*pack)(const WeightRows&, int64_t, char*);
  void (*quantise)(const float*, int64_t, int64_t, int64_t, const Int8Rows&);
  void (*multiply)(const Int8Product&);
};
constexpr Kernels kSets[] = {
    {"AVX512-VNNI", false, 64, avx512::int8_pack, avx512::int8_quantise, avx512::int8_multiply},
    {"AMX", true, 64, avx512::int8_pack, avx512::int8_quantise, avx512::int8_multiply},
    {"AVX-VNNI", false, 16, avx_vnni::int8_pack, avx_vnni::int8_quantise, avx_vnni::int8_multiply},
    {"AVX2", false, 16, avx2::int8_pack, avx2::int8_quantise, avx2::int8_multiply},
};

constexpr int64_t kPart = 64;  // columns that are computed apart: whole panels of each set

struct Problem {
  int64_t rows, depth, columns;
  std::vector<float> x, weight, bias, base;  // base: what the products may be added to
  Int8Groups groups;

  Problem(int64_t rows_, int64_t depth_, int64_t columns_, std::mt19937& random)
      : rows(rows_), depth(depth_), columns(columns_), x(rows * depth), weight(columns * depth), bias(columns),
        base(rows * columns), groups(depth) {
    std::normal_distribution<float> normal;
    for (auto* values : {&x, &weight, &bias, &base})
      for (float& value : *values) value = normal(random);
  }

  // bias + x W^T, or base + x W^T: integers as the formula says, and the sums of each group added in order.
  std::vector<float> by_integers(bool add) const {
    std::vector<float> c(rows * columns);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t column = 0; column < columns; ++column) {
        const float *a = &x[row * depth], *w = &weight[column * depth];
        float top = 0.f;
        for (int64_t k = 0; k < depth; ++k) top = std::fmax(top, std::fabs(w[k]));
        float y = add ? base[row * columns + column] : bias[column];
        for (int64_t first = 0; first < depth; first += groups.size) {
          const int64_t last = std::min(first + groups.size, depth);
          float low = a[first], high = a[first];
          for (int64_t k = first; k < last; ++k) low = std::fmin(low, a[k]), high = std::fmax(high, a[k]);
          int64_t sum = 0, of_weight = 0;
          for (int64_t k = first; k < last; ++k) {
            const int64_t q_w = std::lrint(w[k] * (127.f / top)), q_x = std::lrint((a[k] - low) * (255.f / (high - low)));
            sum += q_x * q_w;
            of_weight += q_w;
          }
          const float scale_w = top / 127.f, scale = scale_w * ((high - low) / 255.f);
          y = std::fma((float)sum, scale, std::fma(low, scale_w * (float)of_weight, y));
        }
        c[row * columns + column] = y;
      }
    return c;
  }

  // The same by kernels: each part of the columns, and of each the groups [0, split) and then the rest. What a product
  // must not read or write is NaN.
  std::vector<float> by(const Kernels& set, int64_t part, int64_t split, bool add) const {
    uses_tiles = set.tiles;
    std::vector<const void*> starts;
    for (int64_t c = 0; c < columns; ++c) starts.push_back(&weight[c * depth]);
    const int64_t panels = (columns + set.width - 1) / set.width;
    std::vector<char> packed(panels * int8_panel_bytes(depth, set.width));
    for (int64_t panel = 0; panel < panels; ++panel)
      set.pack({starts.data(), columns, depth, false}, panel, packed.data());
    const Int8Weight w{packed.data(), bias.data(), depth, columns};

    const int64_t stride = columns + 16;
    std::vector<float> c((rows + 16) * stride, NAN);
    for (int64_t row = 0; add && row < rows; ++row)
      std::memcpy(&c[row * stride], &base[row * columns], columns * sizeof(float));
    for (int64_t first = 0; first < groups.count; first = first ? groups.count : split) {
      const int64_t left = first * groups.size, last = first ? depth : std::min(split * groups.size, depth);
      const Int8Groups of_part = groups.part(last - left);
      std::vector<char> scratch(Int8Rows::bytes(rows, of_part));
      const Int8Rows a = Int8Rows::in(scratch.data(), rows, of_part);
      set.quantise(x.data() + left, depth, 0, rows, a);
      for (int64_t column = 0; column < columns; column += part)
        set.multiply(
            {a, w, first, rows, column, std::min(part, columns - column), &c[column], stride, add || first, w.packed});
    }
    std::vector<float> y;
    for (int64_t i = 0; i < (int64_t)c.size(); ++i)
      if (i / stride < rows && i % stride < columns)
        y.push_back(c[i]);
      else if (c[i] == c[i])
        y.assign(rows * columns, NAN);  // written beside C
    return y;
  }
};

int main() {
  std::mt19937 random(0);
  const int64_t shapes[][3] = {{1, 64, 16},    {37, 384, 80},  {16, 768, 64}, {50, 400, 112},
                               {33, 1024, 48}, {20, 1536, 176}};
  for (const auto& [rows, depth, columns] : shapes) {
    const Problem problem(rows, depth, columns, random);
    for (bool add : {false, true}) {
      const auto expected = problem.by_integers(add);
      for (const Kernels& set : kSets)
        for (int64_t part : {columns, kPart})
          for (int64_t split : {problem.groups.count, (int64_t)1}) {
            const auto y = problem.by(set, part, split, add);
            if (y.size() == expected.size() && !std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)))
              continue;
            std::printf(
                "%s differs: %ld rows, depth %ld, %ld columns in parts of %ld, first %ld groups, add %d\n", set.name,
                rows, depth, columns, part, split, add);
            return 1;
          }
    }
  }
  std::printf("the same bits\n");
}
