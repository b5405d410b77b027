// attention_forward_task with products of bfloat16 pairs (AVX512-BF16) of float32 q, k and v; scores, biases and softmax
// are float32. Included for AVX-512 only.

constexpr int64_t kPairStep = 4 * kPanel;  // bytes of a pair of terms of a panel

FASTENC_INLINE void store_pairs(char* target, Vec x) {
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
  __builtin_memcpy(target, &narrow, sizeof narrow);
}

// C (count x kRows rows, kVectors vectors) = A B of `pairs` pairs of terms.
template <int kRows, int kVectors>
static void pair_tiles(int64_t count, const char* a, int64_t lda, const char* b, int64_t pairs, float* c, int64_t ldc) {
  for (; count; --count, a += kRows * lda, c += kRows * ldc) {
    __m512 sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = __m512{};
    for (int64_t k = 0; k < pairs; ++k) {
      __m512bh b_k[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) b_k[v] = (__m512bh)_mm512_loadu_si512(b + k * kPairStep + 64 * v);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        int32_t pair;
        __builtin_memcpy(&pair, a + r * lda + 4 * k, 4);
        const auto a_k = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], a_k, b_k[v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(c + r * ldc + v * kLanes, (Vec)sums[r][v]);
  }
}

using PairTiles = void (*)(int64_t, const char*, int64_t, const char*, int64_t, float*, int64_t);

template <int kVectors>
FASTENC_INLINE PairTiles pair_tiles_of_rows(int64_t rows) {
  static_assert(kTileRows == 6);
  constexpr PairTiles tiles[] = {pair_tiles<1, kVectors>, pair_tiles<2, kVectors>, pair_tiles<3, kVectors>,
                                 pair_tiles<4, kVectors>, pair_tiles<5, kVectors>, pair_tiles<6, kVectors>};
  return tiles[rows - 1];
}

FASTENC_INLINE PairTiles pair_tiles_of(int64_t rows, int64_t vectors) {
  static_assert(kTileVectors == 4);
  if (vectors == 1) return pair_tiles_of_rows<1>(rows);
  if (vectors == 2) return pair_tiles_of_rows<2>(rows);
  return vectors == 3 ? pair_tiles_of_rows<3>(rows) : pair_tiles_of_rows<4>(rows);
}

// C (rows x columns) = A B, where B is stored in panels of kPanel columns, panel_bytes apart.
static void multiply_pairs(
    const char* a, int64_t lda, const char* panels, int64_t panel_bytes, int64_t pairs, float* c, int64_t ldc,
    int64_t rows, int64_t columns) {
  for (int64_t j = 0; j < columns; j += kPanel, panels += panel_bytes)
    share_rows(rows, [&](int64_t count, int64_t tile_rows, int64_t first) {
      pair_tiles_of(tile_rows, panel_width(columns - j) / kLanes)(
          count, a + first * lda, lda, panels, pairs, c + first * ldc + j, ldc);
    });
}

// Panels of keys: of each pair of dimensions, the keys side by side.
static void pack_keys(const float* k, int64_t stride, int64_t length, int64_t dim, char* panels) {
  for (int64_t j = 0; j < length; j += kLanes)
    for (int64_t d = 0; d < dim; d += 2 * kLanes) {
      char* target = panels + j / kPanel * (dim / 2) * kPairStep + d / 2 * kPairStep + j % kPanel * 4;
      const bool both = d + kLanes < dim;
      Vec pairs[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const float* row = k + (j + i) * stride + d;
        const Vec low = j + i < length ? load(row) : Vec{}, high = j + i < length && both ? load(row + kLanes) : Vec{};
        pairs[i] = (Vec)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      }
      transpose(pairs);
      const int count = both ? kLanes : kLanes / 2;
      for (int i = 0; i < count; ++i) store((float*)(target + i * kPairStep), pairs[i]);
    }
}

// Panels of dimensions: of each pair of values, the dimensions side by side. An odd last one's partner is 0.
static void pack_values(const float* v, int64_t stride, int64_t length, int64_t dim, int64_t panel_bytes, char* panels) {
  for (int64_t j = 0; j < length; j += 2)
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Vec low = load(v + j * stride + d), high = j + 1 < length ? load(v + (j + 1) * stride + d) : Vec{};
      const VecU l = __builtin_convertvector((VecH)_mm512_cvtneps_pbh((__m512)low), VecU);
      const VecU h = __builtin_convertvector((VecH)_mm512_cvtneps_pbh((__m512)high), VecU);
      const VecU pairs = l | (h << 16);
      __builtin_memcpy(panels + d / kPanel * panel_bytes + j / 2 * kPairStep + d % kPanel * 4, &pairs, sizeof pairs);
    }
}

// Without dropout; a.lse is not written.
void attention_bf16(const Attention& a, const AttentionTask& task, float* scratch) {
  const int64_t dim = a.head_dim, length = task.length_k, out_stride = a.num_heads * dim;
  const int64_t key_panel = dim / 2 * kPairStep, value_panel = (length + 1) / 2 * kPairStep;
  const int64_t query_stride = 2 * dim + 64, p_stride = 2 * padded_length(length) + 64;
  char* keys = (char*)scratch;
  char* values = keys + panels_length(length) / kPanel * key_panel;
  char* queries = values + (dim + kPanel - 1) / kPanel * value_panel;
  char* p = queries + kAttentionRows * query_stride;
  float* scores = (float*)(p + kAttentionRows * p_stride);
  float* widened = scores + kAttentionRows * scores_stride(length);  // rotated keys, then rotated queries and results
  const ScoreBias bias(a, task, widened + (length > kAttentionRows ? length : kAttentionRows) * dim);
  const float* q = rows_of<float>(a.q, task.first_q, task.head);
  const float* k = rows_of<float>(a.k, task.first_k, task.head / a.group);
  float* out = (float*)a.out + task.first_q * out_stride + task.head * dim;
  if (changes_keys(a)) {
    read_keys(a, k, length, widened);
    pack_keys(widened, dim, length, dim, keys);
  } else {
    pack_keys(k, a.k.token_stride, length, dim, keys);
  }
  pack_values(rows_of<float>(a.v, task.first_k, task.head / a.group), a.v.token_stride, length, dim, value_panel, values);
  for (int64_t row = 0; row < task.length_q; row += kAttentionRows) {
    const int64_t left = task.length_q - row, rows = left < kAttentionRows ? left : kAttentionRows;
    const VisibleKeys seen(a, task, row, rows);
    if (seen.count <= 0) {
      clear_rows(out + row * out_stride, out_stride, rows, dim);
      continue;
    }
    const int64_t padded = padded_length(seen.count), stride = scores_stride(seen.count);
    read_queries(a, q + row * a.q.token_stride, rows, row, widened);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = 0; d < dim; d += kLanes) store_pairs(queries + r * query_stride + 2 * d, load(widened + r * dim + d));
    multiply_pairs(
        queries, query_stride, keys + seen.first / kPanel * key_panel, key_panel, dim / 2, scores, stride, rows, padded);
    Vec partial[kAttentionRows];
    float row_max[kAttentionRows], row_sums[kAttentionRows];
    for (int64_t r = 0; r < rows; ++r)
      partial[r] = bias.changes_scores() ? bias.add_to(scores + r * stride, row + r, seen.first, seen.count)
                                         : row_maxima(scores + r * stride, seen.count);
    fold_all<max>(partial, rows, row_max);
    for (int64_t r = 0; r < rows; ++r) {
      const Vec top = splat(row_max[r] == -__builtin_inff() ? 0.f : row_max[r]);  // avoids inf - inf
      Vec row_sum{};
      for (int64_t j = 0; j < padded; j += kLanes) {
        const Vec e = exp2_of_negative((load(scores + r * stride + j) - top) * kLog2E);
        row_sum += e;
        store_pairs(p + r * p_stride + 2 * j, e);
      }
      partial[r] = row_sum;
    }
    fold_all<add>(partial, rows, row_sums);
    multiply_pairs(
        p, p_stride, values + seen.first / 2 * kPairStep, value_panel, (seen.count + 1) / 2, widened, dim, rows, dim);
    for (int64_t r = 0; r < rows; ++r) {
      const float inverse = row_sums[r] == 0.f ? 0.f : 1.f / row_sums[r];
      narrow(widened + r * dim, 1, dim, inverse, out + (row + r) * out_stride, dim);
    }
  }
}
