// Sequences side by side: lane s of every vector belongs to the block's sequence s, so one step of the recursion takes
// a few products for all sequences. Only the parameters' gradients are summed across lanes, at the end. The longest
// sequence comes first, so the sequences that have a token t are the first `active` ones.

typedef double VecD __attribute__((vector_size(2 * FASTENC_VECTOR_BYTES)));

struct CrfBlock {
  const int64_t* sequence;
  const int64_t* first;
  const int64_t* length;
  int count;

  int active(int64_t t) const {
    int n = 0;
    while (n < count && length[n] > t) ++n;
    return n;
  }
  int64_t token(int s, int64_t t) const {
    if (s >= count || !length[s]) s = 0;
    return first[s] + (t < length[s] ? t : length[s] - 1);
  }
};

FASTENC_INLINE float* aligned(float* p) { return (float*)(((uintptr_t)p + 63) & ~(uintptr_t)63); }

// Transposes the rows of token t of all sequences: tag j of all sequences is at out + j * kLanes. A sequence that ended
// before t gives its last row.
static void crf_gather(
    const float* rows, int64_t width, const CrfBlock& block, int64_t t, int64_t num_tags, float* out) {
  const float* row[kLanes];
  for (int s = 0; s < kLanes; ++s) row[s] = rows + block.token(s, t) * width;
  for (int64_t c = 0; c < num_tags; c += kLanes) {
    const int n = num_tags - c < kLanes ? (int)(num_tags - c) : kLanes;
    Vec turned[kLanes];
#pragma GCC unroll 16
    for (int s = 0; s < kLanes; ++s) turned[s] = load_n(row[s] + c, n);
    transpose(turned);
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) store(out + (c + j) * kLanes, turned[j]);
  }
}

// The inverse, for the sequences that have a token t.
static void crf_scatter(
    const float* values, int64_t width, const CrfBlock& block, int64_t t, int64_t num_tags, float* rows) {
  const int active = block.active(t);
  for (int64_t c = 0; c < num_tags; c += kLanes) {
    const int n = num_tags - c < kLanes ? (int)(num_tags - c) : kLanes;
    Vec turned[kLanes];
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) turned[j] = load(values + (c + j) * kLanes);
    transpose(turned);
#pragma GCC unroll 16
    for (int s = 0; s < kLanes; ++s)
      if (s < active) store_n(rows + (block.first[s] + t) * width + c, turned[s], n);
  }
}

// out[j] = sum_i weights[i] matrix[i, j], for each lane; rows of the matrix are padded to whole vectors.
static void crf_product(const float* weights, const float* matrix, int64_t num_tags, int64_t stride, float* out) {
  for (int64_t j = 0; j < num_tags; j += 4) {
    Vec total[4] = {};
    for (int64_t i = 0; i < num_tags; ++i) {
      const Vec weight = load(weights + i * kLanes);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) total[k] += weight * matrix[i * stride + j + k];
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) store(out + (j + k) * kLanes, total[k]);
  }
}

// x = exp(x - their maximum), for each lane; returns the maximum.
static Vec crf_weigh(float* x, int64_t num_tags) {
  Vec highest = load(x);
  for (int64_t j = 1; j < num_tags; ++j) highest = max(highest, load(x + j * kLanes));
  for (int64_t j = 0; j < num_tags; ++j) store(x + j * kLanes, exp(load(x + j * kLanes) - highest));
  return highest;
}

// Fills alphas and norms, as probabilities; writes log Z without the end's scores.
static void crf_forward_lanes(const Crf& a, const CrfBlock& block, double* log_z, float* scratch) {
  const int64_t size = a.stride * kLanes;
  float *x = aligned(scratch), *alpha = x + size, *arriving = alpha + size;
  VecD sums{}, factors = sums + 1.0;
  const auto add_logarithms = [&] {
    for (int s = 0; s < block.count; ++s) sums[s] += ::log(factors[s]);
    factors = VecD{} + 1.0;
  };
  for (int64_t t = 0; t < block.length[0]; ++t) {
    const int active = block.active(t);
    const VecI live = kLaneIndex < active;
    crf_gather(a.emissions, a.num_tags, block, t, a.num_tags, x);
    if (t == 0)
      for (int64_t j = 0; j < a.num_tags; ++j) store(x + j * kLanes, load(x + j * kLanes) + a.start[j]);
    const Vec highest = crf_weigh(x, a.num_tags);
    if (t) {
      crf_product(alpha, a.from_rows, a.num_tags, a.stride, arriving);
      for (int64_t j = 0; j < a.num_tags; ++j)
        store(x + j * kLanes, load(x + j * kLanes) * load(arriving + j * kLanes));
    }
    Vec total{};
    for (int64_t j = 0; j < a.num_tags; ++j) total += load(x + j * kLanes);
    const Vec norm = live ? total : splat(1.f), scale = 1.f / norm;
    for (int64_t j = 0; j < a.num_tags; ++j) store(alpha + j * kLanes, load(x + j * kLanes) * scale);
    crf_scatter(alpha, a.stride, block, t, a.num_tags, a.alphas);
    for (int s = 0; s < active; ++s) a.norms[block.first[s] + t] = norm[s];
    sums += __builtin_convertvector(live ? highest : splat(0.f), VecD);
    // One logarithm for eight norms: their product is at least e^-480, which a double holds.
    factors *= __builtin_convertvector(norm, VecD);
    if (t % 8 == 7) add_logarithms();
  }
  add_logarithms();
  for (int s = 0; s < block.count; ++s) log_z[s] = sums[s] + (block.length[s] - 1) * (double)a.top;
}

// As crf_backward, for sequences side by side.
static void crf_backward_lanes(
    const Crf& a, const CrfBlock& block, const float* weights, float* demissions, float* dstart, float* dend,
    float* pairs, float* scratch) {
  const int64_t tags = a.num_tags, size = a.stride * kLanes;
  float *alpha = aligned(scratch), *beta = alpha + size, *leaving = beta + size, *gradient = leaving + size;
  float *ends = gradient + size, *lane_pairs = ends + a.stride;
  for (int64_t c = 0; c < tags * kLanes; c += kLanes) store(beta + c, Vec{});
  for (int64_t c = 0; c < tags * tags * kLanes; c += kLanes) store(lane_pairs + c, Vec{});
  crf_ends<false>(a, ends);
  Vec weight{};
  // The incoming gradient of an empty sequence is not read: infinity times 0 would put NaN into the sums.
  for (int s = 0; s < block.count && block.length[s]; ++s) weight[s] = weights[block.sequence[s]];
  int active = 0;
  for (int64_t t = block.length[0] - 1; t >= 0; --t) {
    const int before = active;
    active = block.active(t);
    crf_gather(a.alphas, a.stride, block, t, tags, alpha);
    if (t + 1 < block.length[0]) {
      // The message from token t + 1 to this one, for the lanes that have both.
      for (int64_t i = 0; i < tags; ++i) {
        const Vec scaled = load(alpha + i * kLanes) * weight;
        float* row = lane_pairs + i * tags * kLanes;
        for (int64_t j = 0; j < tags; ++j)
          store(row + j * kLanes, load(row + j * kLanes) + scaled * load(leaving + j * kLanes));
      }
      crf_product(leaving, a.to_rows, tags, a.stride, beta);
    }
    const VecI ending = (kLaneIndex < active) & (kLaneIndex >= before);
    if (active > before) {
      Vec join{};
      for (int64_t j = 0; j < tags; ++j) join += load(alpha + j * kLanes) * ends[j];
      for (int64_t j = 0; j < tags; ++j) {
        float* b = beta + j * kLanes;
        store(b, ending ? ends[j] / join : load(b));
      }
    }
    for (int64_t j = 0; j < tags; ++j) {
      const Vec g = load(alpha + j * kLanes) * load(beta + j * kLanes) * -weight;
      store(gradient + j * kLanes, g);
      if (active > before) dend[j] += sum(ending ? g : Vec{});
      if (t == 0) dstart[j] += sum(g);
    }
    crf_scatter(gradient, tags, block, t, tags, demissions);
    for (int s = 0; s < active; ++s) {
      const int64_t token = block.first[s] + t, y = a.tags[token];
      demissions[token * tags + y] += weight[s];
      if (s >= before) dend[y] += weight[s];
      if (t) {
        const int64_t y_before = a.tags[token - 1];
        lane_pairs[(y_before * tags + y) * kLanes + s] -= weight[s] / a.from_rows[y_before * a.stride + y];
      } else {
        dstart[y] += weight[s];
      }
    }
    if (t == 0) break;
    crf_gather(a.emissions, tags, block, t, tags, leaving);
    crf_weigh(leaving, tags);
    Vec norm = splat(1.f);
    for (int s = 0; s < active; ++s) norm[s] = a.norms[block.first[s] + t];
    const Vec scale = 1.f / norm;
    for (int64_t j = 0; j < tags; ++j) {
      float* l = leaving + j * kLanes;
      store(l, load(l) * load(beta + j * kLanes) * scale);
    }
  }
  for (int64_t i = 0; i < tags; ++i)
    for (int64_t j = 0; j < tags; ++j) pairs[i * a.stride + j] += sum(load(lane_pairs + (i * tags + j) * kLanes));
}

// The best paths; `came_from` holds kLanes numbers for every token but the first and every tag.
static void crf_viterbi_lanes(
    const Crf& a, const CrfBlock& block, int64_t* paths, float* scores, float* scratch, uint16_t* came_from) {
  const int64_t tags = a.num_tags, size = a.stride * kLanes;
  float *best = aligned(scratch), *next = best + size, *x = next + size;
  VecD offsets{};
  crf_gather(a.emissions, tags, block, 0, tags, best);
  for (int64_t j = 0; j < tags; ++j) store(best + j * kLanes, load(best + j * kLanes) + a.start[j]);
  for (int64_t t = 1; t < block.length[0]; ++t) {
    const int active = block.active(t);
    const VecI live = kLaneIndex < active;
    crf_gather(a.emissions, tags, block, t, tags, x);
    uint16_t* from = came_from + (t - 1) * tags * kLanes;
    Vec top = splat(kMinusInfinity);
    for (int64_t j = 0; j < tags; j += 2) {
      Vec highest[2] = {splat(kMinusInfinity), splat(kMinusInfinity)};
      VecI best_tag[2] = {};
      for (int64_t i = 0; i < tags; ++i) {
        const Vec score = load(best + i * kLanes);
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) {
          const Vec candidate = score + a.from_rows[i * a.stride + j + k];
          best_tag[k] = candidate > highest[k] ? VecI{} + (int32_t)i : best_tag[k];
          highest[k] = max(highest[k], candidate);
        }
      }
      for (int k = 0; k < 2 && j + k < tags; ++k) {
        const VecH narrow = __builtin_convertvector((VecU)best_tag[k], VecH);
        __builtin_memcpy(from + (j + k) * kLanes, &narrow, sizeof narrow);
        const Vec score = highest[k] + load(x + (j + k) * kLanes);
        store(next + (j + k) * kLanes, score);
        top = max(top, score);
      }
    }
    // Scores are kept near 0, so that a long sum does not lose the digits that tell two paths apart.
    const Vec shift = top > splat(kMinusInfinity) ? top : Vec{};
    offsets += __builtin_convertvector(live ? shift : Vec{}, VecD);
    for (int64_t j = 0; j < tags; ++j) {
      float* b = best + j * kLanes;
      store(b, live ? load(next + j * kLanes) - shift : load(b));
    }
  }
  for (int s = 0; s < block.count; ++s) {
    const int64_t first = block.first[s];
    if (!block.length[s]) continue;
    int64_t tag = 0;
    const auto score = [&](int64_t j) { return best[j * kLanes + s] + a.end[j]; };
    for (int64_t j = 1; j < tags; ++j)
      if (score(j) > score(tag)) tag = j;
    scores[block.sequence[s]] = (float)(offsets[s] + score(tag));
    for (int64_t t = block.length[s] - 1; t >= 0; --t) {
      paths[first + t] = tag;
      if (t) tag = came_from[((t - 1) * tags + tag) * kLanes + s];
    }
  }
}

// Calls lanes(block) for a block of the group with enough tokens, and rows(index) for each sequence of the others.
template <class Lanes, class Rows>
FASTENC_INLINE void crf_each_block(const CrfGroup& group, bool lanes_can, Lanes lanes, Rows rows) {
  for (int64_t s = 0; s < group.count; s += kLanes) {
    const int64_t left = group.count - s;
    const CrfBlock block{group.sequence + s, group.first + s, group.length + s, left < kLanes ? (int)left : kLanes};
    int64_t tokens = 0;
    for (int i = 0; i < block.count; ++i) tokens += block.length[i];
    if (!tokens) return;
    // One step of all lanes takes about as long as two tokens of a single sequence.
    if (lanes_can && tokens >= 2 * block.length[0])
      lanes(block);
    else
      for (int i = 0; i < block.count && block.length[i]; ++i) rows(s + i);
  }
}

void crf_forward(const Crf& a, const CrfGroup& group, float* log_likelihoods, float* scratch) {
  crf_each_block(
      group, crf_fills_lanes(a, false),
      [&](const CrfBlock& block) {
        double log_z[kLanes];
        crf_forward_lanes(a, block, log_z, scratch);
        for (int i = 0; i < block.count && block.length[i]; ++i)
          log_likelihoods[block.sequence[i]] =
              crf_log_likelihood<false>(a, block.first[i], block.length[i], log_z[i]);
      },
      [&](int64_t s) {
        const auto forward = a.logarithms ? crf_forward_as<true> : crf_forward_as<false>;
        log_likelihoods[group.sequence[s]] = forward(a, group.first[s], group.length[s]);
      });
}

void crf_backward(
    const Crf& a, const CrfGroup& group, const float* weights, float* demissions, float* dstart, float* dend,
    float* pairs, float* scratch) {
  crf_each_block(
      group, crf_fills_lanes(a, false),
      [&](const CrfBlock& block) {
        crf_backward_lanes(a, block, weights, demissions, dstart, dend, pairs, scratch);
      },
      [&](int64_t s) {
        const auto backward = a.logarithms ? crf_backward_as<true> : crf_backward_as<false>;
        const float weight = weights[group.sequence[s]];
        backward(a, group.first[s], group.length[s], weight, demissions, dstart, dend, pairs, scratch);
      });
}

void crf_viterbi(const Crf& a, const CrfGroup& group, int64_t* paths, float* scores, float* scratch) {
  crf_each_block(
      group, crf_fills_lanes(a, true),
      [&](const CrfBlock& block) {
        auto* came_from = (uint16_t*)(scratch + 3 * a.stride * kLanes + 16);
        crf_viterbi_lanes(a, block, paths, scores, scratch, came_from);
      },
      [&](int64_t s) {
        float* score = scores + group.sequence[s];
        crf_viterbi_rows(a, group.first[s], group.length[s], paths + group.first[s], score, scratch);
      });
}
