// One sequence at a time; a vector holds tags of one token. The recursion has two forms. The first computes with
// probabilities, rescaled at each token, and multiplies by the matrix of exponentials. Underflow does no harm while the
// transitions lie within a bound of each other, which crf.cpp checks. The second computes with logarithms; it takes
// constrained transitions, scored -10000 or -infinity.

constexpr float kMinusInfinity = -__builtin_inff();

FASTENC_INLINE Vec finite_or_zero(Vec v) { return v > splat(-3e38f) ? v : splat(0.f); }

// out[c] = log sum_k exp(add[k] + rows[k][c]).
static void log_sum_exp_rows(const float* add, const float* rows, int64_t count, int64_t stride, float* out) {
  for (int64_t c = 0; c < stride; c += kLanes) {
    Vec highest = splat(kMinusInfinity), total{};
    for (int64_t k = 0; k < count; ++k) highest = max(highest, load(rows + k * stride + c) + add[k]);
    highest = finite_or_zero(highest);
    for (int64_t k = 0; k < count; ++k) total += exp(load(rows + k * stride + c) + add[k] - highest);
    store(out + c, total);
    for (int i = 0; i < kLanes; ++i) out[c + i] = logf(out[c + i]) + highest[i];
  }
}

static float log_sum_exp(const float* values, int64_t stride) {
  Vec highest = splat(kMinusInfinity), total{};
  for (int64_t c = 0; c < stride; c += kLanes) highest = max(highest, load(values + c));
  float top = maximum(highest);
  if (!(top > kMinusInfinity)) top = 0.f;
  for (int64_t c = 0; c < stride; c += kLanes) total += exp(load(values + c) - top);
  return logf(sum(total)) + top;
}

// One token's emissions, plus the start scores at the first token. Padding holds -infinity.
FASTENC_INLINE Vec crf_scores(const Crf& a, int64_t token, bool at_start, int64_t c) {
  const int64_t left = a.num_tags - c;
  const int n = left < kLanes ? (int)left : kLanes;
  Vec x = load_n(a.emissions + token * a.num_tags + c, n, kMinusInfinity);
  return at_start ? x + load_n(a.start + c, n) : x;
}

// out = exp(scores - their maximum); returns the maximum.
static float crf_weights(const Crf& a, int64_t token, bool at_start, float* out) {
  Vec highest = splat(kMinusInfinity);
  for (int64_t c = 0; c < a.stride; c += kLanes) {
    const Vec scores = crf_scores(a, token, at_start, c);
    store(out + c, scores);
    highest = max(highest, scores);
  }
  const float top = maximum(highest);
  for (int64_t c = 0; c < a.stride; c += kLanes) store(out + c, exp(load(out + c) - top));
  return top;
}

static double crf_path_score(const Crf& a, int64_t first, int64_t length) {
  const int64_t* y = a.tags + first;
  double score = (double)a.start[y[0]] + a.end[y[length - 1]];
  for (int64_t t = 0; t < length; ++t) {
    score += a.emissions[(first + t) * a.num_tags + y[t]];
    if (t) score += a.transitions[y[t - 1] * a.num_tags + y[t]];
  }
  return score;
}

// One vector of sum_k weights[k] rows[k], in four independent sums: with one, each addition would wait for the last.
FASTENC_INLINE Vec weighted_sum(const float* weights, const float* rows, int64_t count, int64_t stride) {
  Vec total[4] = {};
  int64_t k = 0;
  for (; k + 4 <= count; k += 4)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) total[i] += load(rows + (k + i) * stride) * weights[k + i];
  for (; k < count; ++k) total[0] += load(rows + k * stride) * weights[k];
  return (total[0] + total[1]) + (total[2] + total[3]);
}

// beta at the last token: the end scores as logarithms, or as weights up to a factor.
template <bool kLogarithms>
static void crf_ends(const Crf& a, float* beta) {
  float top = 0.f;
  if (!kLogarithms) {
    top = a.end[0];
    for (int64_t j = 1; j < a.num_tags; ++j) top = a.end[j] > top ? a.end[j] : top;
  }
  for (int64_t c = 0; c < a.stride; c += kLanes) {
    const int64_t left = a.num_tags - c;
    const Vec ends = load_n(a.end + c, left < kLanes ? (int)left : kLanes, kMinusInfinity);
    store(beta + c, kLogarithms ? ends : exp(ends - top));
  }
}

// log sum_j alpha_j beta_j, or its counterpart on logarithms.
template <bool kLogarithms>
static float crf_join(const Crf& a, const float* alpha, const float* beta, float* scratch) {
  Vec total{};
  for (int64_t c = 0; c < a.stride; c += kLanes) {
    if (kLogarithms)
      store(scratch + c, load(alpha + c) + load(beta + c));
    else
      total += load(alpha + c) * load(beta + c);
  }
  return kLogarithms ? log_sum_exp(scratch, a.stride) : logf(sum(total));
}

// The log-likelihood. log_z is given without the last token's alphas and the end scores.
template <bool kLogarithms>
static float crf_log_likelihood(const Crf& a, int64_t first, int64_t length, double log_z) {
  const float* last = a.alphas + (first + length - 1) * a.stride;
  double total = 0.0, top = -__builtin_inf();
  for (int64_t j = 0; j < a.num_tags; ++j) {
    const double score = a.end[j] + (kLogarithms ? (double)last[j] : 0.0);
    top = score > top ? score : top;
  }
  if (!(top > -__builtin_inf())) top = 0.0;
  for (int64_t j = 0; j < a.num_tags; ++j)
    total += kLogarithms ? ::exp((double)last[j] + a.end[j] - top) : last[j] * ::exp(a.end[j] - top);
  return (float)(crf_path_score(a, first, length) - (log_z + top + ::log(total)));
}

template <bool kLogarithms>
static float crf_forward_as(const Crf& a, int64_t first, int64_t length) {
  double log_z = 0.0, factors = 1.0;
  float* row = a.alphas + first * a.stride;
  for (int64_t t = 0; t < length; ++t, row += a.stride) {
    const float* before = row - a.stride;
    if (kLogarithms) {
      if (t) {
        log_sum_exp_rows(before, a.from_rows, a.num_tags, a.stride, row);
        for (int64_t c = 0; c < a.stride; c += kLanes)
          store(row + c, load(row + c) + crf_scores(a, first + t, false, c));
      } else {
        for (int64_t c = 0; c < a.stride; c += kLanes) store(row + c, crf_scores(a, first, true, c));
      }
      const float norm = log_sum_exp(row, a.stride);
      for (int64_t c = 0; c < a.stride; c += kLanes) store(row + c, load(row + c) - norm);
      a.norms[first + t] = norm;
      log_z += norm;
      continue;
    }
    log_z += crf_weights(a, first + t, t == 0, row);
    Vec total{};
    for (int64_t c = 0; c < a.stride; c += kLanes) {
      Vec x = load(row + c);
      if (t) x *= weighted_sum(before, a.from_rows + c, a.num_tags, a.stride);
      store(row + c, x);
      total += x;
    }
    const float norm = sum(total), scale = 1.f / norm;
    for (int64_t c = 0; c < a.stride; c += kLanes) store(row + c, load(row + c) * scale);
    a.norms[first + t] = norm;
    // One logarithm for eight norms: their product is at least e^-480, which a double holds.
    factors *= norm;
    if (t % 8 == 7) {
      log_z += ::log(factors);
      factors = 1.0;
    }
    if (t) log_z += a.top;
  }
  log_z += ::log(factors);
  return crf_log_likelihood<kLogarithms>(a, first, length, log_z);
}

template <bool kLogarithms>
static void crf_backward_as(
    const Crf& a, int64_t first, int64_t length, float weight, float* demissions, float* dstart, float* dend,
    float* pairs, float* scratch) {
  demissions += first * a.num_tags;
  float *beta = scratch, *leaving = scratch + a.stride, *spare = scratch + 2 * a.stride;
  float* sequence_pairs = scratch + 3 * a.stride;  // of this sequence: shorter sums lose fewer digits
  for (int64_t c = 0; c < a.num_tags * a.stride; c += kLanes) store(sequence_pairs + c, Vec{});
  const int64_t* y = a.tags + first;
  crf_ends<kLogarithms>(a, beta);
  const float last_norm = crf_join<kLogarithms>(a, a.alphas + (first + length - 1) * a.stride, beta, spare);
  const float last_scale = expf(-last_norm);
  for (int64_t c = 0; c < a.stride; c += kLanes)
    store(beta + c, kLogarithms ? load(beta + c) - last_norm : load(beta + c) * last_scale);
  for (int64_t t = length - 1; t >= 0; --t) {
    const float* alpha = a.alphas + (first + t) * a.stride;
    float* de = demissions + t * a.num_tags;
    for (int64_t c = 0; c < a.num_tags; c += kLanes) {
      const int64_t left = a.num_tags - c;
      const int n = left < kLanes ? (int)left : kLanes;
      const Vec marginal = kLogarithms ? exp(load(alpha + c) + load(beta + c)) : load(alpha + c) * load(beta + c);
      const Vec gradient = marginal * -weight;
      store_n(de + c, gradient, n);
      if (t == length - 1) store_n(dend + c, load_n(dend + c, n) + gradient, n);
      if (t == 0) store_n(dstart + c, load_n(dstart + c, n) + gradient, n);
    }
    de[y[t]] += weight;
    if (!t) break;
    // The message from this token to the one before: e_t(j) beta_t(j) / norm_t.
    const float norm = a.norms[first + t];
    if (kLogarithms) {
      for (int64_t c = 0; c < a.stride; c += kLanes)
        store(leaving + c, crf_scores(a, first + t, false, c) + load(beta + c) - norm);
    } else {
      crf_weights(a, first + t, false, leaving);
      for (int64_t c = 0; c < a.stride; c += kLanes)
        store(leaving + c, load(leaving + c) * load(beta + c) * (1.f / norm));
    }
    const float* before = alpha - a.stride;
    for (int64_t i = 0; i < a.num_tags; ++i) {
      const float* from = a.from_rows + i * a.stride;
      float* sums = sequence_pairs + i * a.stride;
      for (int64_t c = 0; c < a.stride; c += kLanes) {
        const Vec pair = kLogarithms ? exp(load(from + c) + load(leaving + c) + before[i])
                                      : load(leaving + c) * before[i];
        store(sums + c, load(sums + c) + pair);
      }
    }
    const int64_t step = y[t - 1] * a.stride + y[t];
    sequence_pairs[step] -= kLogarithms ? 1.f : 1.f / a.from_rows[step];
    if (kLogarithms)
      log_sum_exp_rows(leaving, a.to_rows, a.num_tags, a.stride, beta);
    else
      for (int64_t c = 0; c < a.stride; c += kLanes)
        store(beta + c, weighted_sum(leaving, a.to_rows + c, a.num_tags, a.stride));
  }
  dstart[y[0]] += weight;
  dend[y[length - 1]] += weight;
  for (int64_t c = 0; c < a.num_tags * a.stride; c += kLanes)
    store(pairs + c, load(pairs + c) + load(sequence_pairs + c) * weight);
}

static void crf_viterbi_rows(
    const Crf& a, int64_t first, int64_t length, int64_t* path, float* score, float* scratch) {
  float *best = scratch, *came_from = scratch;  // row t >= 1 of came_from is row t + 1 of the scratch
  double offset = 0.0;
  float* next = scratch + a.stride;  // row 1 is free, because came_from has no row 0
  for (int64_t c = 0; c < a.stride; c += kLanes) store(best + c, crf_scores(a, first, true, c));
  for (int64_t t = 1; t < length; ++t) {
    float* from = came_from + (t + 1) * a.stride;
    for (int64_t c = 0; c < a.stride; c += kLanes) {
      Vec highest = splat(kMinusInfinity), best_tag{};
      for (int64_t i = 0; i < a.num_tags; ++i) {
        const Vec candidate = load(a.from_rows + i * a.stride + c) + best[i];
        best_tag = candidate > highest ? splat((float)i) : best_tag;
        highest = max(highest, candidate);
      }
      store(from + c, best_tag);
      store(next + c, highest + crf_scores(a, first + t, false, c));
    }
    // Scores are kept near 0, so that a long sum does not lose the digits that tell two paths apart.
    Vec highest = splat(kMinusInfinity);
    for (int64_t c = 0; c < a.stride; c += kLanes) highest = max(highest, load(next + c));
    const float top = maximum(highest), shift = top > kMinusInfinity ? top : 0.f;
    offset += shift;
    for (int64_t c = 0; c < a.stride; c += kLanes) store(best + c, load(next + c) - shift);
  }
  int64_t tag = 0;
  for (int64_t j = 1; j < a.num_tags; ++j)
    if (best[j] + a.end[j] > best[tag] + a.end[tag]) tag = j;
  *score = (float)(offset + best[tag] + a.end[tag]);
  for (int64_t t = length - 1; t >= 0; --t) {
    path[t] = tag;
    if (t) tag = (int64_t)came_from[(t + 1) * a.stride + tag];
  }
}

// Viterbi's recursion with the n best ways to each tag, sorted, instead of one. `best` and `next` have n rows. A way is
// stored as (previous tag) * n + its rank among the ways to that tag.
void crf_nbest(
    const Crf& a, int64_t first, int64_t length, int64_t n, int64_t* paths, int64_t path_stride, float* scores,
    int64_t score_stride, float* scratch) {
  const int64_t block = n * a.stride;
  float *best = scratch, *next = scratch + block, *ways = scratch + block;  // block t of ways, for t >= 1
  double offset = 0.0;
  for (int64_t c = 0; c < a.stride; c += kLanes) {
    store(best + c, crf_scores(a, first, true, c));
    for (int64_t r = 1; r < n; ++r) store(best + r * a.stride + c, splat(kMinusInfinity));
  }
  for (int64_t t = 1; t < length; ++t) {
    float* from = ways + t * block;
    Vec highest = splat(kMinusInfinity);
    for (int64_t c = 0; c < a.stride; c += kLanes) {
      for (int64_t r = 0; r < n; ++r) store(next + r * a.stride + c, splat(kMinusInfinity));
      for (int64_t i = 0; i < a.num_tags; ++i) {
        const Vec arriving = load(a.from_rows + i * a.stride + c);
        for (int64_t r = 0; r < n; ++r) {
          Vec score = arriving + best[r * a.stride + i], way = splat((float)(i * n + r));
          // r ways to tag i are at least as good, so the first r rows stay.
          for (int64_t s = r; s < n; ++s) {
            float *kept = next + s * a.stride + c, *kept_way = from + s * a.stride + c;
            const Vec old = load(kept), old_way = load(kept_way);
            const auto better = score > old;
            store(kept, better ? score : old);
            store(kept_way, better ? way : old_way);
            score = better ? old : score;
            way = better ? old_way : way;
          }
        }
      }
      const Vec e = crf_scores(a, first + t, false, c);
      for (int64_t r = 0; r < n; ++r) store(next + r * a.stride + c, load(next + r * a.stride + c) + e);
      highest = max(highest, load(next + c));
    }
    const float top = maximum(highest), shift = top > kMinusInfinity ? top : 0.f;
    offset += shift;
    for (int64_t c = 0; c < block; c += kLanes) store(best + c, load(next + c) - shift);
  }
  float* taken = next;  // ways to each tag that are paths already
  for (int64_t j = 0; j < a.num_tags; ++j) taken[j] = 0.f;
  for (int64_t k = 0; k < n; ++k) {
    int64_t tag = -1, rank = 0;
    float top = kMinusInfinity;
    for (int64_t j = 0; j < a.num_tags; ++j) {
      const int64_t r = (int64_t)taken[j];
      const float score = r < n ? best[r * a.stride + j] + a.end[j] : kMinusInfinity;
      if (score > top) top = score, tag = j, rank = r;
    }
    scores[k * score_stride] = tag < 0 ? kMinusInfinity : (float)(offset + top);
    if (tag >= 0) taken[tag] += 1.f;
    for (int64_t t = length - 1; t >= 0; --t) {
      paths[k * path_stride + t] = tag;
      if (t && tag >= 0) {
        const int64_t way = (int64_t)ways[t * block + rank * a.stride + tag];
        tag = way / n, rank = way % n;
      }
    }
  }
}
