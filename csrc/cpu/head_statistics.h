// One (sequence, head) at a time, over attention's tiles: scores exist for a block of query rows only, and a second pass
// over a row, while it is in the first cache, forms every sum.

// The sums of one row: of e = 2^x, x = scale * (score - highest) * log2(e), and of e x and e |j - i|; the row holds e after it.
struct HeadRow {
  Vec total, weighted, distance;
};

FASTENC_INLINE HeadRow head_row(float* scores, int64_t padded, float top, float scale, int64_t query) {
  HeadRow sums{};
  const Vec highest = splat(top), factor = splat(scale * kLog2E);
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Vec x = (load(scores + j) - highest) * factor;  // exactly 0 at the highest score
    const Vec e = exp2_of_negative(x);
    const Vec offset = __builtin_convertvector(kLaneIndex + (int32_t)(j - query), Vec);
    sums.total += e;
    sums.weighted += e * max(x, splat(-1000.f));  // beyond the sequence x is -inf and e is 0
    sums.distance += e * max(offset, -offset);
    store(scores + j, e);
  }
  return sums;
}

// The first place in [begin, end) of the highest value.
FASTENC_INLINE int32_t head_strongest(const float* values, int64_t begin, int64_t end) {
  Vec highest = splat(-1.f);
  VecI place{};
  for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes) {
    const VecI index = kLaneIndex + (int32_t)j;
    const Vec value = (index >= (int32_t)begin) & (index < (int32_t)end) ? load(values + j) : splat(-1.f);
    const VecI better = value > highest;
    highest = better ? value : highest;
    place = better ? index : place;
  }
  const float top = maximum(highest);
  int32_t first = (int32_t)begin;
  bool found = false;
  for (int lane = 0; lane < kLanes; ++lane)
    if (highest[lane] == top && (!found || place[lane] < first)) {
      first = place[lane];
      found = true;
    }
  return first;
}

template <class T>
static void head_statistics_task(
    const HeadStatistics& h, int64_t first, int64_t length, int64_t head, float* scratch) {
  const int64_t dim = h.head_dim, padded = padded_length(length), stride = scores_stride(length);
  float* keys = scratch;  // transposed, in panels
  float* scores = keys + panels_length(length) * dim;
  float* queries = scores + kAttentionRows * stride;
  const bool inner = h.skip_ends && length > 2;
  const T* q = rows_of<T>(h.q, first, head);
  widen_transposed(rows_of<T>(h.k, first, head), h.k.token_stride, length, dim, keys);
  for (int64_t row = 0; row < length; row += kAttentionRows) {
    const int64_t left = length - row, rows = left < kAttentionRows ? left : kAttentionRows;
    widen(q + row * h.q.token_stride, h.q.token_stride, rows, dim, 1.f, queries);
    multiply_panels(queries, dim, keys, scores, stride, rows, padded, dim);
    Vec partial[kAttentionRows], weighted[kAttentionRows], distances[kAttentionRows];
    float tops[kAttentionRows], totals[kAttentionRows], weights[kAttentionRows], lengths[kAttentionRows];
    for (int64_t r = 0; r < rows; ++r) partial[r] = row_maxima(scores + r * stride, length);
    fold_all<max>(partial, rows, tops);
    for (int64_t r = 0; r < rows; ++r) {
      const HeadRow sums = head_row(scores + r * stride, padded, tops[r], h.scale, row + r);
      partial[r] = sums.total;
      weighted[r] = sums.weighted;
      distances[r] = sums.distance;
    }
    fold_all<add>(partial, rows, totals);
    fold_all<add>(weighted, rows, weights);
    fold_all<add>(distances, rows, lengths);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = row + r, token = first + i;
      const float* p = scores + r * stride;
      const float inverse = 1.f / totals[r];
      const int32_t target = h.targets ? h.targets[token] : -1;
      float* out = h.statistics + (token * h.num_heads + head) * kHeadStatistics;
      out[0] = __builtin_logf(totals[r]) - weights[r] * inverse / kLog2E;
      out[1] = lengths[r] * inverse;
      out[2] = p[0] * inverse;
      out[3] = p[length - 1] * inverse;
      out[4] = p[i] * inverse;
      out[5] = i ? p[i - 1] * inverse : 0.f;
      out[6] = i + 1 < length ? p[i + 1] * inverse : 0.f;
      out[7] = target >= 0 && target < length ? p[target] * inverse : 0.f;
      h.strongest[token * h.num_heads + head] = head_strongest(p, inner, length - inner);
    }
  }
}

void head_statistics(
    const HeadStatistics& h, bool bf16, int64_t first, int64_t length, int64_t head, float* scratch) {
  bf16 ? head_statistics_task<bfloat16>(h, first, length, head, scratch)
       : head_statistics_task<float>(h, first, length, head, scratch);
}
