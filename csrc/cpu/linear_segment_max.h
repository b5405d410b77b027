// A tile of the product is compared while it is in the second-level cache, and only the largest values reach memory.

void segment_max_rows(
    const SegmentMax& a, const float* product, int64_t first, int64_t last, int64_t left, int64_t right,
    int64_t* sequence) {
  const int64_t width = right - left;
  for (; *sequence < a.batch && a.cu_seqlens[*sequence] < last; ++*sequence) {
    const int64_t start = a.cu_seqlens[*sequence], end = a.cu_seqlens[*sequence + 1];
    const int64_t from = start > first ? start : first, to = end < last ? end : last;
    float* largest = a.largest + *sequence * a.columns + left;
    float* argmax = (float*)a.argmax + *sequence * a.columns + left;  // holds integers
    auto compare = [&](int64_t c, int n) __attribute__((always_inline)) {
      const bool begins = from == start;
      Vec best = begins ? load_n(product + (from - first) * width + c, n) : load_n(largest + c, n);
      VecI where = begins ? VecI{} + (int32_t)from : (VecI)load_n(argmax + c, n);
      for (int64_t row = from + begins; row < to; ++row) {
        const Vec value = load_n(product + (row - first) * width + c, n);
        const VecI better = (value > best) | ((value != value) & (best == best));
        best = better ? value : best;
        where = better ? VecI{} + (int32_t)row : where;
      }
      store_n(largest + c, best, n);
      store_n(argmax + c, (Vec)where, n);
    };
    if (from < to) FASTENC_FOR_COLUMNS(width, compare);
    if (end > last) return;  // the next rows continue it
  }
}

// target += factor * row
template <class T>
FASTENC_INLINE void add_multiple(float* target, const T* row, float factor, int64_t depth) {
  auto add_columns = [&](int64_t c, int n) __attribute__((always_inline)) {
    store_n(target + c, load_n(target + c, n) + load_n(row + c, n) * splat(factor), n);
  };
  FASTENC_FOR_COLUMNS(depth, add_columns);
}

// Calls add(column, token, dy) for the columns [left, right) of a sequence, where the gradient is not 0: after a ReLU
// most are.
template <class T, class Add>
FASTENC_INLINE void for_maxima(const SegmentMaxGradient& a, int64_t sequence, int64_t left, int64_t right, Add add) {
  const T* dy = (const T*)a.dy + sequence * a.columns;
  const int32_t* argmax = a.argmax + sequence * a.columns;
  for (int64_t column = left; column < right; ++column) {
    const float factor = to_float(dy[column]);
    if (factor != 0.f && argmax[column] >= 0) add(column, (int64_t)argmax[column], factor);
  }
}

template <class T>
static void weight_gradient(const SegmentMaxGradient& a, int64_t left, int64_t right, float* sums) {
  __builtin_memset(sums, 0, (right - left) * a.depth * sizeof(float));
  for (int64_t sequence = 0; sequence < a.batch; ++sequence)
    for_maxima<T>(a, sequence, left, right, [&](int64_t column, int64_t token, float factor) {
      add_multiple(sums + (column - left) * a.depth, (const T*)a.rows + token * a.depth, factor, a.depth);
    });
}

// A block of W stays in the second-level cache while all sequences use it.
constexpr int64_t kGradientColumns = 128;

// A token has the maxima of thousands of columns, and one long sum would round more than a matrix product. So this number
// of terms is summed before it is added to the rest.
constexpr int32_t kSummedTerms = 64;

// target += sums, and sums = 0
FASTENC_INLINE void move_sums(float* target, float* sums, int64_t depth) {
  auto move_columns = [&](int64_t c, int n) __attribute__((always_inline)) {
    store_n(target + c, load_n(target + c, n) + load_n(sums + c, n), n);
    store_n(sums + c, Vec{}, n);
  };
  FASTENC_FOR_COLUMNS(depth, move_columns);
}

template <class T>
static void input_gradient(const SegmentMaxGradient& a, int64_t begin, int64_t end, const SegmentMaxSums& to) {
  for (int64_t left = 0; left < a.columns; left += kGradientColumns) {
    const int64_t right = a.columns - left < kGradientColumns ? a.columns : left + kGradientColumns;
    for (int64_t sequence = begin; sequence < end; ++sequence)
      for_maxima<T>(a, sequence, left, right, [&](int64_t column, int64_t token, float factor) {
        float* sums = to.sums + token * a.depth;
        add_multiple(sums, (const T*)a.rows + column * a.depth, factor, a.depth);
        if (++to.terms[token] < kSummedTerms) return;
        move_sums(to.dx + token * a.depth, sums, a.depth);
        to.terms[token] = 0;
      });
  }
}

void segment_max_weight_gradient(const SegmentMaxGradient& a, bool bf16, int64_t left, int64_t right, float* sums) {
  bf16 ? weight_gradient<bfloat16>(a, left, right, sums) : weight_gradient<float>(a, left, right, sums);
}

void segment_max_input_gradient(
    const SegmentMaxGradient& a, bool bf16, int64_t begin, int64_t end, const SegmentMaxSums& to) {
  bf16 ? input_gradient<bfloat16>(a, begin, end, to) : input_gradient<float>(a, begin, end, to);
}
