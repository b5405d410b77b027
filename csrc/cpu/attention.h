// One (sequence, head) at a time. Operands are widened to float once, keys (and in the backward values)
// transposed, so that every product is C[rows x columns] (+)= A B with B's columns contiguous: one register-blocked
// micro-kernel serves all of them. Scores exist for a block of query rows only; the backward forms them again
// instead of reading them back, so nothing of size length x length is ever stored.

constexpr int kTileRows = 6;
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;  // 24 of 32, or 12 of 16 registers accumulate
constexpr int64_t kForwardRows = 6, kBackwardRows = 48;

struct Matrix {  // element (row, k) at data[row * stride_row + k * stride_k]
  const float* data;
  int64_t stride_row, stride_k;
};

template <int kVectors, bool kAdd>
FASTENC_INLINE void multiply_tile(Matrix a, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc, int rows) {
  Vec sums[kTileRows][kVectors];
  const float* a_row[kTileRows];
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r) {
    a_row[r] = a.data + (r < rows ? r : rows - 1) * a.stride_row;  // spare rows repeat the last one
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[r][v] = Vec{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec b_k[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) b_k[v] = load(b + k * ldb + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) {
      const Vec a_k = splat(a_row[r][k * a.stride_k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] += a_k * b_k[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r)
    if (r < rows)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* target = c + r * ldc + v * kLanes;
        store(target, kAdd ? load(target) + sums[r][v] : sums[r][v]);
      }
}

// C (rows x columns) = or += A (rows x depth) B (depth x columns); columns a multiple of kLanes.
template <bool kAdd>
static void multiply(
    Matrix a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows, int64_t columns, int64_t depth) {
  int64_t j = 0;
  const auto columns_of = [&](auto tile, int64_t width) __attribute__((always_inline)) {
    for (; j + width <= columns; j += width)
      for (int64_t r = 0; r < rows; r += kTileRows) {
        const Matrix a_tile{a.data + r * a.stride_row, a.stride_row, a.stride_k};
        tile(a_tile, b + j, c + r * ldc + j, (int)(rows - r < kTileRows ? rows - r : kTileRows));
      }
  };
  columns_of(
      [&](Matrix m, const float* b_, float* c_, int n) {
        multiply_tile<kTileVectors, kAdd>(m, b_, ldb, depth, c_, ldc, n);
      },
      kTileVectors * kLanes);
  columns_of(
      [&](Matrix m, const float* b_, float* c_, int n) { multiply_tile<2, kAdd>(m, b_, ldb, depth, c_, ldc, n); },
      2 * kLanes);
  columns_of(
      [&](Matrix m, const float* b_, float* c_, int n) { multiply_tile<1, kAdd>(m, b_, ldb, depth, c_, ldc, n); },
      kLanes);
}

// Widens `rows` rows to float, times `factor`.
template <class T>
static void widen(const T* source, int64_t stride, int64_t rows, int64_t head_dim, float factor, float* target) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < head_dim; d += kLanes)
      store(target + i * head_dim + d, load(source + i * stride + d) * factor);
}

template <class T>
static void narrow(const float* source, int64_t rows, int64_t head_dim, float factor, T* target, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < head_dim; d += kLanes)
      store(target + i * stride + d, load(source + i * head_dim + d) * factor);
}

// target[d][j] = source[j][d], zero for rows <= j < padded.
template <class T>
static void widen_transposed(
    const T* source, int64_t stride, int64_t rows, int64_t padded, int64_t head_dim, float* target) {
  for (int64_t j0 = 0; j0 < padded; j0 += kLanes) {
    float block[kLanes][128];
    for (int j = 0; j < kLanes; ++j)
      for (int64_t d = 0; d < head_dim; d += kLanes)
        store(&block[j][d], j0 + j < rows ? load(source + (j0 + j) * stride + d) : Vec{});
    for (int64_t d = 0; d < head_dim; ++d) {
      Vec column;
      for (int j = 0; j < kLanes; ++j) column[j] = block[j][d];
      store(target + d * padded + j0, column);
    }
  }
}

// Turns `length` scores into exp(score - max), zero in the padding; returns 1 / their sum.
FASTENC_INLINE float exponentials(float* scores, int64_t length, int64_t padded) {
  for (int64_t j = length; j < padded; ++j) scores[j] = -__builtin_inff();
  Vec highest = splat(-__builtin_inff());
  for (int64_t j = 0; j < padded; j += kLanes) highest = max(load(scores + j), highest);
  const float top = maximum(highest);
  Vec total{};
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Vec e = exp(load(scores + j) - top);
    total += e;
    store(scores + j, e);
  }
  return 1.f / sum(total);
}

FASTENC_INLINE void row_dropout(const Attention& a, int64_t token, int64_t head, int64_t length, float* keep) {
  dropout_scales(
      a.dropout.seed, (uint32_t)head, (uint32_t)token, length, a.dropout.threshold, a.dropout.scale, keep);
}

FASTENC_INLINE int64_t padded_length(int64_t length) { return (length + kLanes - 1) / kLanes * kLanes; }
FASTENC_INLINE int64_t keep_length(int64_t length) {
  return (length + kPhiloxColumns - 1) / kPhiloxColumns * kPhiloxColumns;
}

template <class T>
static void attention_forward_task(const Attention& a, int64_t first, int64_t length, int64_t head, float* scratch) {
  const int64_t dim = a.head_dim, padded = padded_length(length);
  const T* q = (const T*)a.qkv + first * a.stride_token + head * a.stride_head;
  T* out = (T*)a.out + (first * a.num_heads + head) * dim;
  float* keys = scratch;  // transposed
  float* values = keys + dim * padded;
  float* scores = values + length * dim;
  float* queries = scores + kForwardRows * padded;
  float* result = queries + kForwardRows * dim;
  float* keep = result + kForwardRows * dim;
  widen_transposed(q + a.stride_part, a.stride_token, length, padded, dim, keys);
  widen(q + 2 * a.stride_part, a.stride_token, length, dim, 1.f, values);
  for (int64_t row = 0; row < length; row += kForwardRows) {
    const int64_t rows = length - row < kForwardRows ? length - row : kForwardRows;
    widen(q + row * a.stride_token, a.stride_token, rows, dim, a.scale, queries);
    multiply<false>({queries, dim, 1}, keys, padded, scores, padded, rows, padded, dim);
    float inverse[kForwardRows];
    for (int64_t r = 0; r < rows; ++r) {
      float* p = scores + r * padded;
      inverse[r] = exponentials(p, length, padded);
      if (a.dropout.threshold) {
        row_dropout(a, first + row + r, head, length, keep);
        for (int64_t j = 0; j < padded; j += kLanes) store(p + j, load(p + j) * load(keep + j));
      }
    }
    multiply<false>({scores, padded, 1}, values, dim, result, dim, rows, dim, length);
    for (int64_t r = 0; r < rows; ++r)
      narrow(result + r * dim, 1, dim, inverse[r], out + (row + r) * a.num_heads * dim, dim);
  }
}

// dv = p_kept^T dout;  dp = dout v^T, kept;  ds = p (dp - sum_j p dp);  dq = scale ds k;  dk = scale ds^T q.
template <class T>
static void attention_backward_task(const Attention& a, int64_t first, int64_t length, int64_t head, float* scratch) {
  const int64_t dim = a.head_dim, padded = padded_length(length), size = length * dim;
  const int64_t out_stride = a.num_heads * dim, grad_stride = 3 * out_stride;
  const T* q = (const T*)a.qkv + first * a.stride_token + head * a.stride_head;
  const T* dout = (const T*)a.dout + (first * a.num_heads + head) * dim;
  T* dq = (T*)a.dqkv + first * grad_stride + head * dim;
  float* keys_t = scratch;
  float* values_t = keys_t + dim * padded;
  float* keys = values_t + dim * padded;
  float* dkeys = keys + size;
  float* dvalues = dkeys + size;
  float* queries = dvalues + size;
  float* douts = queries + kBackwardRows * dim;
  float* dqueries = douts + kBackwardRows * dim;
  float* p = dqueries + kBackwardRows * dim;
  float* ds = p + kBackwardRows * padded;
  float* keep = ds + kBackwardRows * padded;
  widen_transposed(q + a.stride_part, a.stride_token, length, padded, dim, keys_t);
  widen_transposed(q + 2 * a.stride_part, a.stride_token, length, padded, dim, values_t);
  widen(q + a.stride_part, a.stride_token, length, dim, 1.f, keys);
  for (int64_t i = 0; i < 2 * size; i += kLanes) store(dkeys + i, Vec{});
  for (int64_t row = 0; row < length; row += kBackwardRows) {
    const int64_t rows = length - row < kBackwardRows ? length - row : kBackwardRows;
    widen(q + row * a.stride_token, a.stride_token, rows, dim, a.scale, queries);
    widen(dout + row * out_stride, out_stride, rows, dim, 1.f, douts);
    multiply<false>({queries, dim, 1}, keys_t, padded, p, padded, rows, padded, dim);
    multiply<false>({douts, dim, 1}, values_t, padded, ds, padded, rows, padded, dim);
    for (int64_t r = 0; r < rows; ++r) {
      float* p_row = p + r * padded;
      float* ds_row = ds + r * padded;
      const float inverse = exponentials(p_row, length, padded);
      if (a.dropout.threshold) row_dropout(a, first + row + r, head, length, keep);
      Vec deltas{};
      for (int64_t j = 0; j < padded; j += kLanes) {
        const Vec probability = load(p_row + j) * inverse;
        Vec dp = load(ds_row + j);
        if (a.dropout.threshold) dp *= load(keep + j);
        deltas += probability * dp;
        store(p_row + j, probability);
        store(ds_row + j, dp);
      }
      const float delta = sum(deltas);
      for (int64_t j = 0; j < padded; j += kLanes) {
        const Vec probability = load(p_row + j);
        store(ds_row + j, probability * (load(ds_row + j) - delta));
        if (a.dropout.threshold) store(p_row + j, probability * load(keep + j));
      }
    }
    multiply<false>({ds, padded, 1}, keys, dim, dqueries, dim, rows, dim, length);
    narrow(dqueries, rows, dim, a.scale, dq + row * grad_stride, grad_stride);
    multiply<true>({ds, 1, padded}, queries, dim, dkeys, dim, length, dim, rows);
    multiply<true>({p, 1, padded}, douts, dim, dvalues, dim, length, dim, rows);
  }
  narrow(dkeys, length, dim, 1.f, dq + out_stride, grad_stride);
  narrow(dvalues, length, dim, 1.f, dq + 2 * out_stride, grad_stride);
}

void attention_forward(const Attention& a, bool bf16, int64_t first, int64_t length, int64_t head, float* scratch) {
  bf16 ? attention_forward_task<bfloat16>(a, first, length, head, scratch)
       : attention_forward_task<float>(a, first, length, head, scratch);
}

void attention_backward(const Attention& a, bool bf16, int64_t first, int64_t length, int64_t head, float* scratch) {
  bf16 ? attention_backward_task<bfloat16>(a, first, length, head, scratch)
       : attention_backward_task<float>(a, first, length, head, scratch);
}
