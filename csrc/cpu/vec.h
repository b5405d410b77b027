// Vectors of floats, written once with the compiler's vector extensions and compiled once per
// instruction set. Included by kernels.inc only, inside namespace fastenc::FASTENC_ISA.
// No templates of the standard library here: the linker could keep one set's copy for another.

#define FASTENC_INLINE static inline __attribute__((always_inline))

constexpr int kLanes = FASTENC_VECTOR_BYTES / 4;
typedef float Vec __attribute__((vector_size(FASTENC_VECTOR_BYTES)));
typedef int32_t VecI __attribute__((vector_size(FASTENC_VECTOR_BYTES)));
typedef uint32_t VecU __attribute__((vector_size(FASTENC_VECTOR_BYTES)));
typedef uint16_t VecH __attribute__((vector_size(FASTENC_VECTOR_BYTES / 2)));

// Subtracts 0, which the compiler removes. It could not remove + 0, because -0 + 0 is +0.
FASTENC_INLINE Vec splat(float value) { return value - Vec{}; }

FASTENC_INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
FASTENC_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

// a * b + c in one rounding, where the instruction set has that. By hand, because g++ 16 does not fuse the
// multiply-adds of some loops with few sums. A sum's bits would then depend on its tile, and so on the batch.
FASTENC_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if FASTENC_VECTOR_BYTES == 64
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FASTENC_VECTOR_BYTES == 32
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif FASTENC_ARM
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

FASTENC_INLINE Vec load(const bfloat16* p) {
  VecH h;
  __builtin_memcpy(&h, p, sizeof h);
  return (Vec)(__builtin_convertvector(h, VecU) << 16);
}
// Rounds to nearest, ties to even; NaN stays NaN.
FASTENC_INLINE void store(bfloat16* p, Vec v) {
#if FASTENC_NEON_BF16
  vst1_bf16((bfloat16_t*)p, vcvt_bf16_f32((float32x4_t)v));
#else
  VecU bits = (VecU)v;
  VecU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  VecU nan = (VecU)(v != v);
  VecH h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), VecH);
  __builtin_memcpy(p, &h, sizeof h);
#endif
}

FASTENC_INLINE float to_float(float value) { return value; }
FASTENC_INLINE float to_float(bfloat16 value) {
  uint32_t bits = (uint32_t)value.bits << 16;
  float result;
  __builtin_memcpy(&result, &bits, sizeof result);
  return result;
}
FASTENC_INLINE void from_float(float* p, float value) { *p = value; }
FASTENC_INLINE void from_float(bfloat16* p, float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  p->bits = value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// 0, 1, 2, ...
constexpr VecI kLaneIndex = {
    0, 1, 2, 3,
#if FASTENC_VECTOR_BYTES >= 32
    4, 5, 6, 7,
#endif
#if FASTENC_VECTOR_BYTES >= 64
    8, 9, 10, 11, 12, 13, 14, 15,
#endif
};

// Loads the first n < kLanes elements; the other lanes hold `fill`.
template <class T>
FASTENC_INLINE Vec load_first(const T* p, int n, float fill = 0.f) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < n ? to_float(p[i]) : fill;
  return load(lanes);
}
template <class T>
FASTENC_INLINE void store_first(T* p, Vec v, int n) {
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < n; ++i) from_float(p + i, lanes[i]);
}

// Masked loads, where the instruction set has them: a load from lanes just written to memory would stall. (The
// compiler's own macros do not tell: g++ reads the whole file before it applies the pragma that chooses the target.)
FASTENC_INLINE Vec load_first(const float* p, int n, float fill = 0.f) {
#if FASTENC_VECTOR_BYTES == 64
  return (Vec)_mm512_mask_loadu_ps((__m512)splat(fill), (__mmask16)((1u << n) - 1u), p);
#elif FASTENC_VECTOR_BYTES == 32
  const VecI mask = kLaneIndex < n;
  const Vec v = (Vec)_mm256_maskload_ps(p, (__m256i)mask);
  return mask ? v : splat(fill);
#else
  return load_first<float>(p, n, fill);
#endif
}
FASTENC_INLINE void store_first(float* p, Vec v, int n) {
#if FASTENC_VECTOR_BYTES == 64
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), (__m512)v);
#elif FASTENC_VECTOR_BYTES == 32
  _mm256_maskstore_ps(p, (__m256i)(kLaneIndex < n), (__m256)v);
#else
  store_first<float>(p, v, n);
#endif
}

FASTENC_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
FASTENC_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }

// The numbers of the lanes as template arguments.
template <class T, T... kValues>
struct Sequence {};
#if defined(__clang__)
template <int kCount>
using Count = __make_integer_seq<Sequence, int, kCount>;
#else
template <int kCount>
using Count = Sequence<int, __integer_pack(kCount)...>;
#endif
using LaneNumbers = Count<kLanes>;

// Lane i of the result is lane kIndex(i) of a's and b's lanes, one after the other. The numbers are constants of one
// built-in, because clang makes six times as many instructions of an assignment to each lane.
template <int (*kIndex)(int), int... kLane>
FASTENC_INLINE Vec shuffle(Vec a, Vec b, Sequence<int, kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kIndex(kLane)...);
#else
  return __builtin_shuffle(a, b, VecI{kIndex(kLane)...});
#endif
}

// a0 b0 a1 b1 ...: from the lower, or the upper, half of the lanes.
constexpr int lower_of_both(int lane) { return lane / 2 + lane % 2 * kLanes; }
constexpr int upper_of_both(int lane) { return lower_of_both(lane) + kLanes / 2; }
FASTENC_INLINE Vec interleave_low(Vec a, Vec b) { return shuffle<lower_of_both>(a, b, LaneNumbers{}); }
FASTENC_INLINE Vec interleave_high(Vec a, Vec b) { return shuffle<upper_of_both>(a, b, LaneNumbers{}); }

// Combines one half of the lanes with the other until one is left, in registers.
template <int kWidth>
constexpr int other_half(int lane) {
  return lane ^ kWidth;
}
template <Vec (*kCombine)(Vec, Vec), int kWidth = kLanes / 2>
FASTENC_INLINE float fold(Vec v) {
  if constexpr (kWidth == 0)
    return v[0];
  else
    return fold<kCombine, kWidth / 2>(kCombine(shuffle<other_half<kWidth>>(v, v, LaneNumbers{}), v));
}
FASTENC_INLINE Vec add(Vec a, Vec b) { return a + b; }
FASTENC_INLINE float sum(Vec v) { return fold<add>(v); }
FASTENC_INLINE float maximum(Vec v) { return fold<max>(v); }

// Transposes kLanes x kLanes elements: every round interleaves rows i and i + kLanes / 2.
FASTENC_INLINE void transpose(Vec* rows) {
  Vec spare[kLanes], *from = rows, *to = spare;
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      to[2 * i] = interleave_low(from[i], from[i + kLanes / 2]);
      to[2 * i + 1] = interleave_high(from[i], from[i + kLanes / 2]);
    }
    Vec* written = to;
    to = from;
    from = written;
  }
  if (from != rows)
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = from[i];
}

// Lane r of the result combines all lanes of rows[r]: a transposition in which each round halves the number of vectors.
template <Vec (*kCombine)(Vec, Vec)>
FASTENC_INLINE Vec fold_rows(const Vec* rows) {
  Vec left[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) left[i] = rows[i];
#pragma GCC unroll 4
  for (int half = kLanes / 2; half; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i)
      left[i] = kCombine(interleave_low(left[i], left[i + half]), interleave_high(left[i], left[i + half]));
  return left[0];
}

// e^x to about one unit in the last place (Cephes' polynomial after Cody-Waite reduction). Below
// -87.3 the result is 0, from 88.4 on infinity. NaN stays NaN.
FASTENC_INLINE Vec exp(Vec x) {
  const Vec low = splat(-87.3f), high = splat(89.f);  // at 89, n is 128, the exponent of infinity
  Vec t = x < low ? low : (x > high ? high : x);
  const float round_to_int = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  Vec shifted = t * 1.44269504088896341f + round_to_int;
  Vec n = shifted - round_to_int;
  Vec r = t - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.f);
  VecI exponent = ((VecI)shifted << 23) + (127 << 23);
  Vec result = p * (Vec)exponent;
  return x < low ? splat(0.f) : result;
}

// log(1 + x) of x >= 0 to about one unit in the last place (Cephes' polynomial). Infinity and NaN stay.
FASTENC_INLINE Vec log1p(Vec x) {
  const int32_t root_of_half = 0x3f3504f3;  // its bits: the mantissa lies between it and twice it
  const Vec u = x + 1.f;
  const VecI shifted = (VecI)u - root_of_half, exponent = shifted >> 23;
  const Vec mantissa = (Vec)((shifted & 0x7fffff) + root_of_half);
  const Vec lost = (x - (u - 1.f)) * (Vec)((127 - exponent) << 23);  // what rounding u lost
  const Vec f = (mantissa - 1.f) + lost, n = __builtin_convertvector(exponent, Vec);
  Vec p = splat(7.0376836292e-2f);
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const Vec square = f * f;
  p = p * f * square + n * -2.12194440e-4f - square * 0.5f;
  const Vec result = f + p + n * 0.693359375f;
  return x < splat(__builtin_inff()) ? result : x;
}

// Calls body(column, count) for each vector of a row.
#define FASTENC_FOR_COLUMNS(width, body)                                \
  do {                                                                  \
    int64_t c = 0;                                                      \
    for (; c + kLanes <= (width); c += kLanes) body(c, kLanes);         \
    if (c < (width)) body(c, (int)((width) - c));                       \
  } while (0)

template <class T>
FASTENC_INLINE Vec load_n(const T* p, int n, float fill = 0.f) {
  return n == kLanes ? load(p) : load_first(p, n, fill);
}
template <class T>
FASTENC_INLINE void store_n(T* p, Vec v, int n) {
  if (n == kLanes)
    store(p, v);
  else
    store_first(p, v, n);
}
