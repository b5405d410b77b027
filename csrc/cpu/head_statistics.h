// One (sequence, head) at a time, with attention's tiles. Scores exist for one block of query rows at a time; a second
// pass over a row, while it is in the first-level cache, forms every sum.

// Sums over one row of e, e x and e |j - i|, where x = (score - highest) * unit and e = 2^x. The scores become e.
struct HeadRow {
  Vec exp_sum, weighted, distance;
};

// query: its position relative to the key of the first score.
FASTENC_INLINE HeadRow head_row(float* scores, int64_t padded, float top, float unit, int64_t query) {
  HeadRow sums{};
  const Vec highest = splat(top), factor = splat(unit);
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Vec x = (load(scores + j) - highest) * factor;  // exactly 0 at the highest score
    const Vec e = exp2_of_negative(x);
    const Vec offset = __builtin_convertvector(kLaneIndex + (int32_t)(j - query), Vec);
    sums.exp_sum += e;
    sums.weighted += e * max(x, splat(-1000.f));  // for a key that is not seen, x is -inf and e is 0
    sums.distance += e * max(offset, -offset);
    store(scores + j, e);
  }
  return sums;
}

// The first index in [begin, end) of the highest value.
FASTENC_INLINE int32_t head_strongest(const float* values, int64_t begin, int64_t end) {
  Vec highest = splat(-1.f);
  VecI best{};
  for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes) {
    const VecI index = kLaneIndex + (int32_t)j;
    const Vec value = (index >= (int32_t)begin) & (index < (int32_t)end) ? load(values + j) : splat(-1.f);
    const VecI better = value > highest;
    highest = better ? value : highest;
    best = better ? index : best;
  }
  const float top = maximum(highest);
  int32_t first = (int32_t)begin;
  bool has_first = false;
  for (int lane = 0; lane < kLanes; ++lane)
    if (highest[lane] == top && (!has_first || best[lane] < first)) {
      first = best[lane];
      has_first = true;
    }
  return first;
}

template <class T>
static void head_statistics_task(
    const HeadStatistics& h, int64_t first, int64_t length, int64_t head, float* scratch) {
  const Attention& a = h.attention;
  const AttentionTask task{first, length, first, length, head};
  const int64_t dim = a.head_dim;
  float* keys = scratch;  // transposed, in panels
  float* scores = keys + panels_length(length) * dim;
  float* queries = scores + kAttentionRows * scores_stride(length);
  const ScoreBias bias(a, task, queries + kAttentionRows * dim);
  // The scores are scaled, not the queries, which scaling would round once more: by add_to where there is a bias, else
  // in the exponential.
  const float unit = bias.changes_scores() ? kLog2E : a.scale * kLog2E;
  const T* q = rows_of<T>(a.q, first, head);
  widen_transposed(rows_of<T>(a.k, first, head), a.k.token_stride, length, dim, keys);
  for (int64_t row = 0; row < length; row += kAttentionRows) {
    const int64_t left = length - row, rows = left < kAttentionRows ? left : kAttentionRows;
    const VisibleKeys seen(a, task, row, rows);
    const int64_t padded = padded_length(seen.count), stride = scores_stride(seen.count);
    widen(q + row * a.q.token_stride, a.q.token_stride, rows, dim, 1.f, queries);
    multiply_panels(queries, dim, keys + seen.first * dim, scores, stride, rows, padded, dim);
    Vec partial[kAttentionRows], weighted[kAttentionRows], distances[kAttentionRows];
    float maxima[kAttentionRows], exp_sums[kAttentionRows], weights[kAttentionRows], lengths[kAttentionRows];
    for (int64_t r = 0; r < rows; ++r) {
      float* row_scores = scores + r * stride;
      if (bias.changes_scores())
        for (int64_t j = 0; j < padded; j += kLanes) store(row_scores + j, load(row_scores + j) * a.scale);
      partial[r] = bias.changes_scores() ? bias.add_to(row_scores, row + r, seen.first, seen.count)
                                         : row_maxima(row_scores, seen.count);
    }
    fold_all<max>(partial, rows, maxima);
    for (int64_t r = 0; r < rows; ++r) {
      const HeadRow sums = head_row(scores + r * stride, padded, maxima[r], unit, row + r - seen.first);
      partial[r] = sums.exp_sum;
      weighted[r] = sums.weighted;
      distances[r] = sums.distance;
    }
    fold_all<add>(partial, rows, exp_sums);
    fold_all<add>(weighted, rows, weights);
    fold_all<add>(distances, rows, lengths);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = row + r, token = first + i;
      const float* e = scores + r * stride;
      const float inverse = 1.f / exp_sums[r];
      const int64_t target = h.targets ? h.targets[token] : -1;
      const auto p = [&](int64_t key) {
        return key >= seen.first && key < seen.first + seen.count ? e[key - seen.first] * inverse : 0.f;
      };
      float* out = h.statistics + (token * a.num_heads + head) * kHeadStatistics;
      out[0] = __builtin_logf(exp_sums[r]) - weights[r] * inverse / kLog2E;
      out[1] = lengths[r] * inverse;
      out[2] = p(0);
      out[3] = p(length - 1);
      out[4] = p(i);
      out[5] = p(i - 1);
      out[6] = p(i + 1);
      out[7] = p(target);
      int64_t begin = first_visible(a, task, i), end = end_visible(a, task, i);
      const int64_t inner_begin = begin ? begin : 1, inner_end = end < length ? end : length - 1;
      if (h.skip_ends && inner_begin < inner_end) begin = inner_begin, end = inner_end;
      h.strongest[token * a.num_heads + head] =
          (int32_t)seen.first + head_strongest(e, begin - seen.first, end - seen.first);
    }
  }
}

void head_statistics(
    const HeadStatistics& h, bool bf16, int64_t first, int64_t length, int64_t head, float* scratch) {
  bf16 ? head_statistics_task<bfloat16>(h, first, length, head, scratch)
       : head_statistics_task<float>(h, first, length, head, scratch);
}
