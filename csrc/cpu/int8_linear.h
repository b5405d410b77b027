// Rows and weights of 8 bits, and what all their products share; see ../int8_linear.h.

// A panel's codes lie as AMX loads them: tiles of kLanes columns by kInt8Unit terms, whose rows have 4 terms of each column.
constexpr int64_t kInt8TileRow = 4 * kLanes, kInt8Tile = kInt8Unit * kLanes;  // bytes
constexpr int64_t kInt8Tiles = kInt8Unit * kPanel;                             // bytes of the tiles side by side

// The range of a group of one row. What is infinite or NaN makes `bad` NaN, and with it the whole group.
struct Range {
  Vec low, high, bad;
};
FASTENC_INLINE void include(Range& range, Vec x) {
  range.low = min(x, range.low);
  range.high = max(x, range.high);
  range.bad += x * 0.f;
}

// low is the least x, so no q is negative, and 255 is reached but not exceeded. (The forms with a mask, because g++ warns
// of the others' own code.)
FASTENC_INLINE void store_codes(uint8_t* target, Vec x, float low, float inverse) {
  const Vec q = (x - low) * inverse;
#if FASTENC_VECTOR_BYTES == 64
  _mm512_mask_cvtepi32_storeu_epi8(target, 0xffff, _mm512_maskz_cvtps_epi32(0xffff, (__m512)q));
#else
  // By hand, because g++ converts a vector to bytes element by element.
  const __m256i whole = _mm256_cvtps_epi32((__m256)q);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64((__m128i*)target, _mm_packus_epi16(halves, halves));
#endif
}

// Quantises `rows` rows, at most kLanes, whose ranges are folded together: x becomes the rows of `to` from `first` on.
// form(row, column) is called once for every vector: it gives the values, which afterwards must lie in x.
template <class Form>
static void quantise_block(
    const float* x, int64_t stride, int64_t rows, const Int8Rows& to, int64_t first, Form form) {
  const Int8Groups& groups = to.groups;
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t left = g * groups.size, columns = groups.columns(g);
    Vec lows[kLanes], highs[kLanes], bads[kLanes];
    for (int64_t r = 0; r < kLanes; ++r) {
      Range range{splat(__builtin_inff()), splat(-__builtin_inff()), Vec{}};
      for (int64_t c = 0; r < rows && c < columns; c += kLanes) include(range, form(r, left + c));
      lows[r] = range.low;
      highs[r] = range.high;
      bads[r] = range.bad;
    }
    // Lane r belongs to row r.
    const Vec low = fold_rows<min>(lows), width = fold_rows<max>(highs) - low, bad = fold_rows<add>(bads);
    alignas(64) float low_of[kLanes], scale_of[kLanes], inverse_of[kLanes], bad_of[kLanes];
    store(low_of, low);
    store(scale_of, width / 255.f);
    store(inverse_of, width > 1e-35f ? 255.f / width : Vec{});
    store(bad_of, bad);
    for (int64_t r = 0; r < rows; ++r) {
      float* range = to.ranges + 2 * ((first + r) * groups.count + g);
      range[0] = scale_of[r] + bad_of[r];
      range[1] = low_of[r] + bad_of[r];
      uint8_t* target = to.q + (first + r) * to.stride + left;
      const float* values = x + r * stride + left;
      for (int64_t c = 0; c < columns; c += kLanes) store_codes(target + c, load(values + c), low_of[r], inverse_of[r]);
      if (columns < groups.size) __builtin_memset(target + columns, 0, groups.size - columns);
    }
  }
}

void int8_quantise(const float* x, int64_t stride, int64_t first, int64_t last, const Int8Rows& to) {
  for (int64_t row = first; row < last; row += kLanes) {
    const float* block = x + row * stride;
    auto value = [&](int64_t r, int64_t c) __attribute__((always_inline)) { return load(block + r * stride + c); };
    quantise_block(block, stride, last - row < kLanes ? last - row : kLanes, to, row, value);
  }
}

// Where term k of column i of a group lies.
FASTENC_INLINE int64_t int8_code(int64_t k, int64_t i) {
  return k / kInt8Unit * kInt8Tiles + i / kLanes * kInt8Tile + k % kInt8Unit / 4 * kInt8TileRow + i % kLanes * 4 + k % 4;
}

FASTENC_INLINE int64_t int8_group_bytes(int64_t size) { return kPanel * 4 + size * kPanel; }

void int8_pack(const WeightRows& weight, int64_t panel, char* packed) {
  const Int8Groups groups(weight.depth);
  char* target = packed + panel * int8_panel_bytes(weight.depth, kPanel);
  auto* scales = (float*)target;
  float inverse[kPanel];
  const float* rows[kPanel];
  for (int64_t i = 0; i < kPanel; ++i) {
    const int64_t column = panel * kPanel + i;
    rows[i] = column < weight.count ? (const float*)weight.rows[column] : nullptr;
    float top = 0.f;
    for (int64_t k = 0; rows[i] && k < weight.depth; ++k) {
      const float size = __builtin_fabsf(rows[i][k]);
      top = size > top ? size : top;
    }
    scales[i] = top / 127.f;
    inverse[i] = top > 1e-35f ? 127.f / top : 0.f;
  }
  target += kPanel * 4;
  for (int64_t g = 0; g < groups.count; ++g, target += int8_group_bytes(groups.size)) {
    auto* of_low = (float*)target;
    auto* codes = (int8_t*)target + kPanel * 4;
    int32_t sums[kPanel] = {};
    for (int64_t k = 0; k < groups.size; ++k)
      for (int64_t i = 0; i < kPanel; ++i) {
        const bool inside = rows[i] && k < groups.columns(g);
        const int32_t q = inside ? (int32_t)__builtin_rintf(rows[i][g * groups.size + k] * inverse[i]) : 0;
        codes[int8_code(k, i)] = (int8_t)q;
        sums[i] += q;
      }
    for (int64_t i = 0; i < kPanel; ++i) of_low[i] = scales[i] * (float)sums[i];
  }
}

// What a group adds to a vector of C.
FASTENC_INLINE Vec add_group(Vec base, VecI sums, const float* range, Vec scales, Vec of_low) {
  const Vec value = __builtin_convertvector(sums, Vec);
  return multiply_add(value, scales * range[0], multiply_add(splat(range[1]), of_low, base));
}

// A group of a panel's columns from some on, and what its product needs beside it.
struct Int8Panel {
  const char* codes;
  const float *of_low, *scales, *bias;  // of these columns; bias may be null
  int64_t depth;                        // of the group
};

// One group of the product's depth; `column` begins a vector.
FASTENC_INLINE Int8Panel int8_panel(const Int8Product& m, const Int8Groups& groups, int64_t g, int64_t column) {
  const int64_t inside = (m.left + column) % kPanel;
  const char* panel = m.w.packed + (m.left + column) / kPanel * int8_panel_bytes(m.w.depth, kPanel);
  const char* group = panel + 4 * kPanel + (m.first_group + g) * int8_group_bytes(groups.size);
  return {
      group + 4 * kPanel + int8_code(0, inside), (const float*)group + inside, (const float*)panel + inside,
      m.w.bias ? m.w.bias + m.left + column : nullptr, groups.size};
}
