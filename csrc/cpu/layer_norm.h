// One row at a time, in cache: h is formed once into scratch, then two passes over it for exact
// statistics. The last width % kLanes columns go through zero-filled vectors.

// Sum over a row's columns of term(column, count), in four sums: additions to a single one would wait for each other.
template <class Term>
FASTENC_INLINE Vec sum_of_columns(int64_t width, Term term) {
  Vec sums[4] = {};
  int64_t c = 0;
  for (; c + 4 * kLanes <= width; c += 4 * kLanes)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[i] += term(c + i * kLanes, kLanes);
  for (; c + kLanes <= width; c += kLanes) sums[0] += term(c, kLanes);
  if (c < width) sums[1] += term(c, (int)(width - c));
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

struct RowStatistics {
  float mean, rstd;
};

// Of a row in scratch whose sum is known.
FASTENC_INLINE RowStatistics row_statistics(const float* h, Vec sums, int64_t width, float eps, bool rms) {
  const float mean = rms ? 0.f : sum(sums) / (float)width;
  auto squared = [&](int64_t c, int n) __attribute__((always_inline)) {
    const Vec d = load_n(h + c, n, mean) - mean;
    return d * d;
  };
  const Vec squares = sum_of_columns(width, squared);
  return {mean, 1.f / __builtin_sqrtf(sum(squares) / (float)width + eps)};
}

FASTENC_INLINE Vec normalised(
    const float* h, RowStatistics s, const float* weight, const float* bias, int64_t c, int n) {
  Vec v = (load_n(h + c, n) - s.mean) * s.rstd;
  if (weight) v *= load_n(weight + c, n);
  if (bias) v += load_n(bias + c, n);
  return v;
}

template <class T>
static void layer_norm_forward_rows(const LayerNormForward& a, int64_t begin, int64_t end, float* scratch) {
  const int64_t width = a.width;
  float* h = scratch;
  float* keep = scratch + dropout_room(width);
  const bool fused = a.x_bias || a.residual || a.h || a.dropout.threshold;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + row * width;
    const T* residual = a.residual ? (const T*)a.residual + row * width : nullptr;
    T* y = (T*)a.y + row * width;
    if (a.dropout.threshold) dropout_scales(a.dropout, 0, (uint32_t)row, width, keep);
    auto widen_row = [&](int64_t c, int n) __attribute__((always_inline)) {
      const Vec v = load_n(x + c, n);
      store_n(h + c, v, n);
      return v;
    };
    auto form = [&](int64_t c, int n) __attribute__((always_inline)) {
      Vec v = load_n(x + c, n);
      if (a.x_bias) v += load_n(a.x_bias + c, n);
      if (a.dropout.threshold) {
        Vec scale = load(keep + c);
        v = scale == 0.f ? Vec{} : v * scale;
      }
      if (residual) v += load_n(residual + c, n);
      if (a.h) {
        store_n((T*)a.h + row * width + c, v, n);
        v = load_n((const T*)a.h + row * width + c, n);  // statistics of what the backward will read
      }
      store_n(h + c, v, n);
      return v;
    };
    const Vec sums = fused ? sum_of_columns(width, form) : sum_of_columns(width, widen_row);
    const RowStatistics s = row_statistics(h, sums, width, a.eps, a.rms);
    auto write = [&](int64_t c, int n) __attribute__((always_inline)) {
      store_n(y + c, normalised(h, s, a.weight, a.bias, c, n), n);
    };
    FASTENC_FOR_COLUMNS(width, write);
    if (a.mean) a.mean[row] = s.mean;
    if (a.rstd) a.rstd[row] = s.rstd;
  }
}

// dh = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * weight; RMSNorm lacks the middle term.
// Calls write(column, count, dh); adds to dweight and dbias, which may be null.
template <class T, class Write>
FASTENC_INLINE void layer_norm_backward_row(
    const T* dy, const T* h, RowStatistics s, const float* weight, bool rms, int64_t width, float* dweight,
    float* dbias, Write write) {
  Vec sum_g{}, sum_gx{};
  auto reduce = [&](int64_t c, int n, Vec& total_g, Vec& total_gx) __attribute__((always_inline)) {
    Vec xhat = (load_n(h + c, n, s.mean) - s.mean) * s.rstd;
    Vec d = load_n(dy + c, n);
    Vec g = weight ? d * load_n(weight + c, n) : d;
    total_g += g;
    total_gx += g * xhat;
    if (dweight) store_n(dweight + c, load_n(dweight + c, n) + d * xhat, n);
    if (dbias) store_n(dbias + c, load_n(dbias + c, n) + d, n);
  };
  Vec odd_g{}, odd_gx{};  // additions to a single sum would wait for each other
  int64_t column = 0;
  for (; column + 2 * kLanes <= width; column += 2 * kLanes) {
    reduce(column, kLanes, sum_g, sum_gx);
    reduce(column + kLanes, kLanes, odd_g, odd_gx);
  }
  if (column + kLanes <= width) {
    reduce(column, kLanes, sum_g, sum_gx);
    column += kLanes;
  }
  if (column < width) reduce(column, (int)(width - column), odd_g, odd_gx);
  sum_g += odd_g;
  sum_gx += odd_gx;
  const float mean_g = rms ? 0.f : sum(sum_g) / (float)width;
  const float mean_gx = sum(sum_gx) / (float)width;
  auto form = [&](int64_t c, int n) __attribute__((always_inline)) {
    Vec xhat = (load_n(h + c, n, s.mean) - s.mean) * s.rstd;
    Vec g = load_n(dy + c, n);
    if (weight) g *= load_n(weight + c, n);
    write(c, n, (g - mean_g - xhat * mean_gx) * s.rstd);
  };
  FASTENC_FOR_COLUMNS(width, form);
}

template <class T>
static void layer_norm_backward_rows(const LayerNormBackward& a, int64_t begin, int64_t end, float* scratch) {
  const int64_t width = a.width;
  float* keep = scratch;
  for (int64_t row = begin; row < end; ++row) {
    T* dh = (T*)a.dh + row * width;
    T* dx = a.dx ? (T*)a.dx + row * width : nullptr;
    const T* dresidual_sum = a.dresidual_sum ? (const T*)a.dresidual_sum + row * width : nullptr;
    if (a.dropout.threshold) dropout_scales(a.dropout, 0, (uint32_t)row, width, keep);
    auto write = [&](int64_t c, int n, Vec d) __attribute__((always_inline)) {
      if (dresidual_sum) d += load_n(dresidual_sum + c, n);
      store_n(dh + c, d, n);
      if (a.dropout.threshold) d *= load(keep + c);
      if (dx) store_n(dx + c, d, n);
      if (a.dx_bias) store_n(a.dx_bias + c, load_n(a.dx_bias + c, n) + d, n);
    };
    layer_norm_backward_row(
        (const T*)a.dy + row * width, (const T*)a.h + row * width, {a.mean[row], a.rstd[row]}, a.weight, a.rms, width,
        a.dweight, a.dbias, write);
  }
}

void layer_norm_forward(const LayerNormForward& a, bool bf16, int64_t begin, int64_t end, float* scratch) {
  bf16 ? layer_norm_forward_rows<bfloat16>(a, begin, end, scratch)
       : layer_norm_forward_rows<float>(a, begin, end, scratch);
}

void layer_norm_backward(const LayerNormBackward& a, bool bf16, int64_t begin, int64_t end, float* scratch) {
  bf16 ? layer_norm_backward_rows<bfloat16>(a, begin, end, scratch)
       : layer_norm_backward_rows<float>(a, begin, end, scratch);
}
