// One row at a time, in cache: h is formed once into scratch, then two passes over it for exact
// statistics. The last width % kLanes columns go through vectors filled with 0, or with the mean.

// Sum over a row's columns of term(column, count), a Vec or Moments, in four independent sums: with one, each addition
// would wait for the last.
template <class Term>
FASTENC_INLINE auto sum_of_columns(int64_t width, Term term) {
  decltype(term(0, kLanes)) sums[4] = {};
  int64_t c = 0;
  for (; c + 4 * kLanes <= width; c += 4 * kLanes)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[i] += term(c + i * kLanes, kLanes);
  for (; c + kLanes <= width; c += kLanes) sums[0] += term(c, kLanes);
  if (c < width) sums[1] += term(c, (int)(width - c));
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Sums of deviations and of their squares.
struct Moments {
  Vec first, second;
};
FASTENC_INLINE Moments operator+(Moments a, Moments b) { return {a.first + b.first, a.second + b.second}; }
FASTENC_INLINE void operator+=(Moments& a, Moments b) { a = a + b; }

struct RowStatistics {
  float mean, rstd;
};

// The statistics of a row in scratch. The mean has the rounding error of the row's sum: equal elements would deviate
// from it, and a small eps would magnify that. The mean of the deviations is this error. It is added to the mean, and
// the variance is E[d^2] - E[d]^2 (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance").
FASTENC_INLINE RowStatistics row_statistics(const float* h, Vec sums, int64_t width, float eps, bool rms) {
  const float mean = rms ? 0.f : sum(sums) / (float)width;
  auto moments = [&](int64_t c, int n) __attribute__((always_inline)) {
    const Vec d = load_n(h + c, n, mean) - mean;
    return Moments{d, d * d};
  };
  const Moments sums_of_deviations = sum_of_columns(width, moments);
  const float square = sum(sums_of_deviations.second) / (float)width;
  if (rms) return {0.f, 1.f / __builtin_sqrtf(square + eps)};
  const float error = sum(sums_of_deviations.first) / (float)width;
  const double variance = square - (double)error * error;  // double: an error of 1e20 would overflow
  return {mean + error, 1.f / __builtin_sqrtf((variance < 0. ? 0.f : (float)variance) + eps)};
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
        v = load_n((const T*)a.h + row * width + c, n);  // the backward reads the rounded h: take its statistics
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
// Computes kRows consecutive rows together, so that dweight and dbias are read and written once for all of them. Calls
// write(row, column, count, dh). Accumulates into dweight and dbias, which may be null, row by row.
template <int kRows, class T, class Write>
FASTENC_INLINE void layer_norm_backward_block(
    const T* dy, const T* h, const float* mean, const float* rstd, const float* weight, bool rms, int64_t width,
    float* dweight, float* dbias, Write write) {
  Vec sum_g[kRows] = {}, sum_gx[kRows] = {};
  auto normalised_row = [&](int r, int64_t c, int n) __attribute__((always_inline)) {
    return (load_n(h + r * width + c, n, mean[r]) - mean[r]) * rstd[r];
  };
  auto reduce = [&](int64_t c, int n) __attribute__((always_inline)) {
    const Vec scale = weight ? load_n(weight + c, n) : splat(1.f);
    Vec weight_sum{}, bias_sum{};
    if (dweight) weight_sum = load_n(dweight + c, n);
    if (dbias) bias_sum = load_n(dbias + c, n);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec xhat = normalised_row(r, c, n), d = load_n(dy + r * width + c, n), g = d * scale;
      sum_g[r] += g;
      sum_gx[r] += g * xhat;
      weight_sum += d * xhat;
      bias_sum += d;
    }
    if (dweight) store_n(dweight + c, weight_sum, n);
    if (dbias) store_n(dbias + c, bias_sum, n);
  };
  FASTENC_FOR_COLUMNS(width, reduce);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const float mean_g = rms ? 0.f : sum(sum_g[r]) / (float)width;
    const float mean_gx = sum(sum_gx[r]) / (float)width;
    auto form = [&](int64_t c, int n) __attribute__((always_inline)) {
      Vec g = load_n(dy + r * width + c, n);
      if (weight) g *= load_n(weight + c, n);
      write(r, c, n, (g - mean_g - normalised_row(r, c, n) * mean_gx) * rstd[r]);
    };
    FASTENC_FOR_COLUMNS(width, form);
  }
}

template <int kRows, class T>
FASTENC_INLINE void layer_norm_backward_rows_from(const LayerNormBackward& a, int64_t first, float* keep) {
  const int64_t width = a.width, offset = first * width;
  T* dh = (T*)a.dh + offset;
  T* dx = a.dx ? (T*)a.dx + offset : nullptr;
  const T* dresidual_sum = a.dresidual_sum ? (const T*)a.dresidual_sum + offset : nullptr;
  const int64_t room = dropout_room(width);
  if (a.dropout.threshold)
    for (int r = 0; r < kRows; ++r) dropout_scales(a.dropout, 0, (uint32_t)(first + r), width, keep + r * room);
  auto write = [&](int r, int64_t c, int n, Vec d) __attribute__((always_inline)) {
    if (dresidual_sum) d += load_n(dresidual_sum + r * width + c, n);
    store_n(dh + r * width + c, d, n);
    if (a.dropout.threshold) d *= load(keep + r * room + c);
    if (dx) store_n(dx + r * width + c, d, n);
    if (a.dx_bias) store_n(a.dx_bias + c, load_n(a.dx_bias + c, n) + d, n);
  };
  layer_norm_backward_block<kRows>(
      (const T*)a.dy + offset, (const T*)a.h + offset, a.mean + first, a.rstd + first, a.weight, a.rms, width,
      a.dweight, a.dbias, write);
}

template <class T>
static void layer_norm_backward_rows(const LayerNormBackward& a, int64_t begin, int64_t end, float* scratch) {
  int64_t row = begin;
  for (; row + 4 <= end; row += 4) layer_norm_backward_rows_from<4, T>(a, row, scratch);
  for (; row < end; ++row) layer_norm_backward_rows_from<1, T>(a, row, scratch);
}

void layer_norm_forward(const LayerNormForward& a, bool bf16, int64_t begin, int64_t end, float* scratch) {
  bf16 ? layer_norm_forward_rows<bfloat16>(a, begin, end, scratch)
       : layer_norm_forward_rows<float>(a, begin, end, scratch);
}

void layer_norm_backward(const LayerNormBackward& a, bool bf16, int64_t begin, int64_t end, float* scratch) {
  bf16 ? layer_norm_backward_rows<bfloat16>(a, begin, end, scratch)
       : layer_norm_backward_rows<float>(a, begin, end, scratch);
}
