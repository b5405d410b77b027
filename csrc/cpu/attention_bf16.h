// attention_forward_task with products of bfloat16 pairs of float32 q, k and v, by AVX512-BF16 or by the tiles of AMX;
// scores, biases and softmax are float32. Included for AVX-512 only.

constexpr int64_t kPairStep = 4 * kPanel;  // bytes of a pair of terms of a panel

// Panels of keys: of each pair of dimensions, the keys side by side. Dimensions past the last are 0, up to an even number
// of vectors.
static void pack_keys(const float* k, int64_t stride, int64_t length, int64_t dim, int64_t panel_bytes, char* panels) {
  for (int64_t j = 0; j < length; j += kLanes)
    for (int64_t d = 0; d < dim; d += 2 * kLanes) {
      char* target = panels + j / kPanel * panel_bytes + d / 2 * kPairStep + j % kPanel * 4;
      const bool both = d + kLanes < dim;
      Vec pairs[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const float* row = k + (j + i) * stride + d;
        const Vec low = j + i < length ? load(row) : Vec{}, high = j + i < length && both ? load(row + kLanes) : Vec{};
        pairs[i] = (Vec)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      }
      transpose(pairs);
      for (int i = 0; i < kLanes; ++i) store((float*)(target + i * kPairStep), pairs[i]);
    }
}

// Panels of dimensions: of each pair of values, the dimensions side by side. Values past the last are 0, up to `padded`.
static void pack_values(
    const float* v, int64_t stride, int64_t length, int64_t padded, int64_t dim, int64_t panel_bytes, char* panels) {
  for (int64_t j = 0; j < padded; j += 2)
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Vec low = j < length ? load(v + j * stride + d) : Vec{};
      const Vec high = j + 1 < length ? load(v + (j + 1) * stride + d) : Vec{};
      const VecU l = __builtin_convertvector((VecH)_mm512_cvtneps_pbh((__m512)low), VecU);
      const VecU h = __builtin_convertvector((VecH)_mm512_cvtneps_pbh((__m512)high), VecU);
      const VecU pairs = l | (h << 16);
      __builtin_memcpy(panels + d / kPanel * panel_bytes + j / 2 * kPairStep + d % kPanel * 4, &pairs, sizeof pairs);
    }
}

// C (rows x columns) = A B of `terms` terms, which for AMX are whole tiles. C has whole tiles of rows.
template <bool kTiles>
FASTENC_INLINE void multiply_bf16(
    const TileRows& a, const TilePanels& b, int64_t terms, int64_t columns, float* c, int64_t ldc, int64_t rows) {
  if constexpr (kTiles)
    multiply_tiles(a, b, terms / kAmxTerms, 0, columns, nullptr, false, c, ldc, rows, true);
  else
    multiply_pairs(a, b, terms / 2, 0, columns, nullptr, false, c, ldc, rows);
}

static_assert(kAttentionRows % kAmxRows == 0);

// Without dropout; a.lse is not written. T: of a.out.
template <bool kTiles, class T>
static void attention_of_pairs(const Attention& a, const AttentionTask& task, float* scratch) {
  const int64_t unit = kTiles ? kAmxTerms : 2;  // terms of a product
  auto padded = [](int64_t count, int64_t to) { return (count + to - 1) / to * to; };
  const int64_t dim = a.head_dim, padded_dim = padded(dim, 2 * kLanes), length = task.length_k;
  const int64_t padded_keys = padded(length, unit), out_stride = a.num_heads * dim;
  const int64_t query_stride = 2 * padded_dim + 64, p_stride = 2 * padded(length, kAmxTerms) + 64;
  const int64_t key_panel = padded_dim / 2 * kPairStep, value_panel = padded_keys / 2 * kPairStep;
  char* keys = (char*)scratch;
  char* values = keys + panels_length(length) / kPanel * key_panel;
  const TileRows queries{values + padded(dim, kPanel) / kPanel * value_panel, query_stride};
  const TileRows p{queries.data + kAttentionRows * query_stride, p_stride};
  float* scores = (float*)(p.data + kAttentionRows * p_stride);
  float* widened = scores + kAttentionRows * scores_stride(length);  // rotated keys, then rotated queries and results
  const ScoreBias bias(a, task, widened + (length > kAttentionRows ? length : kAttentionRows) * dim);
  const float* q = rows_of<float>(a.q, task.first_q, task.head);
  const float* k = rows_of<float>(a.k, task.first_k, task.head / a.group);
  const float* v = rows_of<float>(a.v, task.first_k, task.head / a.group);
  T* out = (T*)a.out + task.first_q * out_stride + task.head * dim;
  if (changes_keys(a)) {
    read_keys(a, k, length, widened);
    pack_keys(widened, dim, length, dim, key_panel, keys);
  } else {
    pack_keys(k, a.k.token_stride, length, dim, key_panel, keys);
  }
  pack_values(v, a.v.token_stride, length, padded_keys, dim, value_panel, values);
  for (int64_t row = 0; row < task.length_q; row += kAttentionRows) {
    const int64_t left = task.length_q - row, rows = left < kAttentionRows ? left : kAttentionRows;
    const VisibleKeys seen(a, task, row, rows);
    if (seen.count <= 0) {
      clear_rows(out + row * out_stride, out_stride, rows, dim);
      continue;
    }
    const int64_t columns = padded_length(seen.count), stride = scores_stride(seen.count);
    const int64_t terms = padded(seen.count, unit);
    const float* q_rows = q + row * a.q.token_stride;
    if (a.query_norm || a.rotary) {
      read_queries(a, q_rows, rows, row, widened);
      fill_tile_rows(widened, dim, rows, dim, queries);
    } else {
      fill_tile_rows(q_rows, a.q.token_stride, rows, dim, queries, a.scale);
    }
    multiply_bf16<kTiles>(
        queries, {keys + seen.first / kPanel * key_panel, kPanel, key_panel}, kTiles ? padded_dim : dim, columns, scores,
        stride, rows);
    Vec partial[kAttentionRows];
    float row_max[kAttentionRows], row_sums[kAttentionRows];
    for (int64_t r = 0; r < rows; ++r)
      partial[r] = bias.changes_scores() ? bias.add_to(scores + r * stride, row + r, seen.first, seen.count)
                                         : row_maxima(scores + r * stride, seen.count);
    fold_all<max>(partial, rows, row_max);
    for (int64_t r = 0; r < rows; ++r) {
      const Vec top = splat(row_max[r] == -__builtin_inff() ? 0.f : row_max[r]);  // avoids inf - inf
      Vec row_sum{};
      for (int64_t j = 0; j < columns; j += kLanes) {
        const Vec e = exp2_of_negative((load(scores + r * stride + j) - top) * kLog2E);
        row_sum += e;
        store_pairs(p.data + r * p_stride + 2 * j, e);
      }
      for (int64_t j = columns; j < terms; j += kLanes) store_pairs(p.data + r * p_stride + 2 * j, Vec{});
      partial[r] = row_sum;
    }
    fold_all<add>(partial, rows, row_sums);
    multiply_bf16<kTiles>(
        p, {values + seen.first / 2 * kPairStep, kPanel, value_panel}, terms, dim, widened, dim, rows);
    for (int64_t r = 0; r < rows; ++r) {
      const float inverse = row_sums[r] == 0.f ? 0.f : 1.f / row_sums[r];
      narrow(widened + r * dim, 1, dim, inverse, out + (row + r) * out_stride, dim);
    }
  }
}

template <bool kTiles>
static void attention_of_pairs(const Attention& a, bool bf16, const AttentionTask& task, float* scratch) {
  bf16 ? attention_of_pairs<kTiles, bfloat16>(a, task, scratch) : attention_of_pairs<kTiles, float>(a, task, scratch);
}

void attention_bf16(const Attention& a, bool bf16, AttentionTask task, int64_t last_head, float* scratch) {
  if (!has_bf16_tiles()) {
    for (; task.head < last_head; ++task.head) attention_of_pairs<false>(a, bf16, task, scratch);
    return;
  }
  const AmxTiles tiles;
  for (; task.head < last_head; ++task.head) attention_of_pairs<true>(a, bf16, task, scratch);
}
