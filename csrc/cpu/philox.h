// Counter-based dropout bits: Philox4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as
// 1, 2, 3"), defined on (seed, offset, stream, row, column) alone, so that any layout, vector width or
// number of threads draws the same mask. Included by kernels.inc only.
//
// Columns go in groups of 128. In a group, column c is 16-bit word c / 16 (0..7) of the Philox output
// for the counter (16 * group + c % 16, row, stream, offset) and the key (seed low, seed high); word 2i is
// the low half of output i, word 2i + 1 the high half. The element is kept if its word is >= threshold.

constexpr int kPhiloxColumns = 128;

typedef uint64_t VecL __attribute__((vector_size(FASTENC_VECTOR_BYTES)));

// 64-bit products of the even lanes.
FASTENC_INLINE VecL multiply_even(VecL a, VecL b) {
#if FASTENC_X86 && FASTENC_VECTOR_BYTES == 64
  return (VecL)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b);  // unmasked, GCC 12 warns of its own header
#elif FASTENC_X86 && FASTENC_VECTOR_BYTES == 32
  return (VecL)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif FASTENC_X86
  return (VecL)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

FASTENC_INLINE void philox_multiply(VecU a, uint32_t factor, VecU* high, VecU* low) {
  const VecL factors = VecL{} + factor, upper = VecL{} + 0xffffffff00000000u;
  const VecL even = multiply_even((VecL)a, factors), odd = multiply_even((VecL)a >> 32, factors);
  *high = (VecU)((even >> 32) | (odd & upper));
  *low = (VecU)((even & ~upper) | (odd << 32));
}

// Writes the 128 words of one group of columns.
FASTENC_INLINE void philox_words(
    const Dropout& dropout, uint32_t stream, uint32_t row, uint32_t group, uint16_t* words) {
  for (int first = 0; first < 16; first += kLanes) {
    VecU c0 = (VecU)kLaneIndex + (16 * group + first), c1 = VecU{} + row, c2 = VecU{} + stream;
    VecU c3 = VecU{} + dropout.offset;
    uint32_t key0 = (uint32_t)dropout.seed, key1 = (uint32_t)(dropout.seed >> 32);
    for (int round = 0; round < 7; ++round) {
      VecU high0, low0, high1, low1;
      philox_multiply(c0, 0xD2511F53u, &high0, &low0);
      philox_multiply(c2, 0xCD9E8D57u, &high1, &low1);
      c0 = high1 ^ c1 ^ key0;
      c1 = low1;
      c2 = high0 ^ c3 ^ key1;
      c3 = low0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    const VecU outputs[4] = {c0, c1, c2, c3};
    for (int i = 0; i < 4; ++i) {
      VecH low = __builtin_convertvector(outputs[i] & 0xffffu, VecH);
      VecH high = __builtin_convertvector(outputs[i] >> 16, VecH);
      __builtin_memcpy(words + (2 * i) * 16 + first, &low, sizeof low);
      __builtin_memcpy(words + (2 * i + 1) * 16 + first, &high, sizeof high);
    }
  }
}

// Writes `dropout.scale` or 0 for columns [0, n) of a row; `out` has room for n rounded up to 128.
FASTENC_INLINE void dropout_scales(
    const Dropout& dropout, uint32_t stream, uint32_t row, int64_t n, float* out) {
  uint16_t words[kPhiloxColumns];
  for (int64_t c = 0; c < n; c += kPhiloxColumns) {
    philox_words(dropout, stream, row, (uint32_t)(c / kPhiloxColumns), words);
    for (int i = 0; i < kPhiloxColumns && c + i < n; i += kLanes) {
      VecH h;
      __builtin_memcpy(&h, words + i, sizeof h);
      VecI keep = (VecI)(__builtin_convertvector(h, VecU) >= (VecU{} + dropout.threshold));
      store(out + c + i, (Vec)(keep & (VecI)splat(dropout.scale)));
    }
  }
}
