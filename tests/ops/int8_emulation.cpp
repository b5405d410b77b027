// The products of 8 bits by AVX512-VNNI as this processor computes them, beside those by AMX and by AVX-VNNI with the
// instructions that few processors have written in plain C++. Exits with 1 and says where they differ. Compiled for
// AVX-512 as a whole, the code for AVX2 too.
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

namespace emulated {

struct Tile {
  uint8_t bytes[16][64];
};
Tile tiles[8];

void load(int tile, const void* from, int64_t stride) {
  for (int row = 0; row < 16; ++row)
    std::memcpy(tiles[tile].bytes[row], static_cast<const char*>(from) + row * stride, 64);
}
void store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < 16; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile].bytes[row], 64);
}
void dpbusd(int sums, int a, int b) {
  auto* c = reinterpret_cast<int32_t(*)[16]>(tiles[sums].bytes);
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n)
      for (int k = 0; k < 64; ++k)
        c[m][n] += tiles[a].bytes[m][k] * static_cast<int8_t>(tiles[b].bytes[k / 4][4 * n + k % 4]);
}
// 8 tiles of 16 rows of 64 bytes.
void configure(const void* config) {
  const auto* bytes = static_cast<const uint8_t*>(config);
  for (int tile = 0; tile < 8; ++tile)
    if (bytes[0] != 1 || bytes[16 + 2 * tile] != 64 || bytes[17 + 2 * tile] || bytes[48 + tile] != 16) std::abort();
}

__m256i dpbusd(__m256i sums, __m256i a, __m256i b) {
  int32_t c[8];
  uint8_t u[32];
  int8_t s[32];
  std::memcpy(c, &sums, 32);
  std::memcpy(u, &a, 32);
  std::memcpy(s, &b, 32);
  for (int i = 0; i < 32; ++i) c[i / 4] += u[i] * s[i];
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c));
}

}  // namespace emulated

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbusd
#define _tile_loadconfig(config) emulated::configure(config)
#define _tile_release()
#define _tile_zero(tile) std::memset(&emulated::tiles[tile], 0, sizeof(emulated::Tile))
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbusd(sums, a, b) emulated::dpbusd(sums, a, b)
#define _mm256_dpbusd_avx_epi32(sums, a, b) emulated::dpbusd(sums, a, b)

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
