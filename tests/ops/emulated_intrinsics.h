// The instructions beyond AVX2 that csrc/cpu names, in plain C++, so that the code that uses them runs on any x86-64
// processor with AVX2. Vectors of 64 bytes need no emulation: the compiler makes them of smaller ones.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace emulated {

// A call for each number would take most of the time: without optimisation the compiler inlines what it is told to.
template <class To, class From>
[[gnu::always_inline]] inline To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class T, int kCount>
struct Lanes {
  T of[kCount];
};
using Floats = Lanes<float, 16>;
using Integers = Lanes<int32_t, 16>;

// Instructions of bfloat16 take what is below 2^-126 as 0.
[[gnu::always_inline]] inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
[[gnu::always_inline]] inline float widen(uint16_t x) { return flushed(as<float>(static_cast<uint32_t>(x) << 16)); }
[[gnu::always_inline]] inline uint16_t narrow(float x) {
  const auto bits = as<uint32_t>(flushed(x));
  return x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// AVX-512: the first `count` elements, those of the mask.
template <class T>
Lanes<T, 64 / sizeof(T)> load(uint64_t mask, const void* from, Lanes<T, 64 / sizeof(T)> otherwise) {
  for (uint64_t i = 0; i < 64 / sizeof(T); ++i)
    if (mask >> i & 1) std::memcpy(&otherwise.of[i], static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
  return otherwise;
}
inline void store(uint64_t mask, float* to, __m512 x) {
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) to[i] = as<Floats>(x).of[i];
}
inline __m512 multiply_add(__m512 a, __m512 b, __m512 c) {
  Floats sums;
  for (int i = 0; i < 16; ++i) sums.of[i] = std::fma(as<Floats>(a).of[i], as<Floats>(b).of[i], as<Floats>(c).of[i]);
  return as<__m512>(sums);
}
// of[i]: that of the 32 floats of a and b whose number is i's.
inline __m512 permute(__m512 a, __m512i numbers, __m512 b) {
  Floats chosen;
  for (int i = 0; i < 16; ++i) {
    const int number = as<Integers>(numbers).of[i] & 31;
    chosen.of[i] = as<Floats>(number < 16 ? a : b).of[number & 15];
  }
  return as<__m512>(chosen);
}
inline __m512i round(__m512 x) {
  Integers rounded;
  for (int i = 0; i < 16; ++i) rounded.of[i] = static_cast<int32_t>(std::nearbyint(as<Floats>(x).of[i]));
  return as<__m512i>(rounded);
}
inline void store_bytes(void* to, __m512i x) {
  for (int i = 0; i < 16; ++i) static_cast<int8_t*>(to)[i] = static_cast<int8_t>(as<Integers>(x).of[i]);
}
inline __m512i repeat(int32_t x) {
  Integers all;
  for (int32_t& each : all.of) each = x;
  return as<__m512i>(all);
}

// Products of 8 bits, unsigned times signed: AVX512-VNNI and AVX-VNNI.
template <class Vector>
Vector dpbusd(Vector sums, Vector a, Vector b) {
  auto c = as<Lanes<int32_t, sizeof(Vector) / 4>>(sums);
  const auto u = as<Lanes<uint8_t, sizeof(Vector)>>(a);
  const auto s = as<Lanes<int8_t, sizeof(Vector)>>(b);
  for (uint64_t i = 0; i < sizeof(Vector); ++i) c.of[i / 4] += u.of[i] * s.of[i];
  return as<Vector>(c);
}

// AVX512-BF16.
inline __m256bh narrow(__m512 x) {
  Lanes<uint16_t, 16> narrowed;
  for (int i = 0; i < 16; ++i) narrowed.of[i] = narrow(as<Floats>(x).of[i]);
  return as<__m256bh>(narrowed);
}
inline __m512bh narrow(__m512 high, __m512 low) {
  return as<__m512bh>(Lanes<__m256bh, 2>{narrow(low), narrow(high)});
}
template <class Vector, class Pairs>
Vector dpbf16(Vector sums, Pairs a, Pairs b) {
  constexpr int kSums = sizeof sums / 4;
  auto c = as<Lanes<float, kSums>>(sums);
  const auto x = as<Lanes<uint16_t, 2 * kSums>>(a), y = as<Lanes<uint16_t, 2 * kSums>>(b);
  for (int i = 0; i < kSums; ++i)
    for (int term : {1, 0})
      c.of[i] = flushed(std::fma(widen(x.of[2 * i + term]), widen(y.of[2 * i + term]), flushed(c.of[i])));
  return as<Vector>(c);
}

// AMX, as Intel's manual defines it.
struct Tile {
  uint8_t bytes[16][64];
};
inline Tile tiles[8];
inline bool configured = false;

inline void configure(const void* config) {
  // 8 tiles of 16 rows of 64 bytes.
  const auto* bytes = static_cast<const uint8_t*>(config);
  for (int tile = 0; tile < 8; ++tile)
    if (bytes[0] != 1 || bytes[16 + 2 * tile] != 64 || bytes[17 + 2 * tile] || bytes[48 + tile] != 16) std::abort();
  if (configured) std::abort();
  configured = true;
}
inline void release() { configured = false; }
inline Tile& tile(int number) {
  if (!configured) std::abort();
  return tiles[number];
}
inline void zero(int to) { tile(to) = {}; }
inline void load_tile(int to, const void* from, int64_t stride) {
  for (int row = 0; row < 16; ++row)
    std::memcpy(tile(to).bytes[row], static_cast<const char*>(from) + row * stride, 64);
}
inline void store_tile(int from, void* to, int64_t stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, tile(from).bytes[row], 64);
}
inline void multiply_int8(int sums, int a, int b) {
  auto* c = reinterpret_cast<int32_t(*)[16]>(tile(sums).bytes);
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n)
      for (int k = 0; k < 64; ++k)
        c[m][n] += tile(a).bytes[m][k] * static_cast<int8_t>(tile(b).bytes[k / 4][4 * n + k % 4]);
}
inline void multiply_bf16(int sums, int a, int b) {
  auto* c = reinterpret_cast<float(*)[16]>(tile(sums).bytes);
  const auto* x = reinterpret_cast<const uint16_t(*)[32]>(tile(a).bytes);
  const auto* y = reinterpret_cast<const uint16_t(*)[32]>(tile(b).bytes);
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      float even = 0.f, odd = 0.f;
      for (int k = 0; k < 16; ++k) {
        even = flushed(std::fma(widen(x[m][2 * k]), widen(y[k][2 * n]), even));
        odd = flushed(std::fma(widen(x[m][2 * k + 1]), widen(y[k][2 * n + 1]), odd));
      }
      c[m][n] = flushed(flushed(c[m][n]) + flushed(even + odd));
    }
}

}  // namespace emulated

#undef _mm512_loadu_si512
#undef _mm512_set1_epi32
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbusd
#undef _tile_dpbf16ps
#define _mm512_mask_loadu_ps(otherwise, mask, from) \
  emulated::as<__m512>(emulated::load<float>(mask, from, emulated::as<emulated::Floats>(otherwise)))
#define _mm512_maskz_loadu_epi16(mask, from) emulated::as<__m512i>(emulated::load<uint16_t>(mask, from, {}))
#define _mm512_loadu_si512(from) emulated::as<__m512i>(emulated::load<int32_t>(~0ull, from, {}))
#define _mm512_mask_storeu_ps(to, mask, x) emulated::store(mask, to, x)
#define _mm512_mask_cvtepi32_storeu_epi8(to, mask, x) emulated::store_bytes(to, x)
#define _mm512_maskz_cvtps_epi32(mask, x) emulated::round(x)
#define _mm512_set1_epi32(x) emulated::repeat(x)
#define _mm512_castsi512_si256(x) emulated::as<emulated::Lanes<__m256i, 2>>(x).of[0]
#define _mm512_fmadd_ps(a, b, c) emulated::multiply_add(a, b, c)
#define _mm512_permutex2var_ps(a, numbers, b) emulated::permute(a, numbers, b)
#define _mm512_dpbusd_epi32(sums, a, b) emulated::dpbusd<__m512i>(sums, a, b)
#define _mm256_dpbusd_avx_epi32(sums, a, b) emulated::dpbusd<__m256i>(sums, a, b)
#define _mm512_cvtneps_pbh(x) emulated::narrow(x)
#define _mm512_cvtne2ps_pbh(high, low) emulated::narrow(high, low)
#define _mm512_dpbf16_ps(sums, a, b) emulated::dpbf16(sums, a, b)
#define _mm256_dpbf16_ps(sums, a, b) emulated::dpbf16(sums, a, b)
#define _tile_loadconfig(config) emulated::configure(config)
#define _tile_release() emulated::release()
#define _tile_zero(to) emulated::zero(to)
#define _tile_loadd(to, from, stride) emulated::load_tile(to, from, stride)
#define _tile_stored(from, to, stride) emulated::store_tile(from, to, stride)
#define _tile_dpbusd(sums, a, b) emulated::multiply_int8(sums, a, b)
#define _tile_dpbf16ps(sums, a, b) emulated::multiply_bf16(sums, a, b)
