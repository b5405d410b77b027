// A tile of the product is summed while it is in the second-level cache, and only the sums reach memory.

FASTENC_INLINE Vec relu_with_nan(Vec x) { return x <= Vec{} ? Vec{} : x; }

void segment_log_sum_rows(
    const SegmentLogSum& a, const float* product, int64_t first, int64_t last, int64_t left, int64_t right, float* sums,
    float* lost) {
  const int64_t width = right - left;
  for (int64_t sequence = 0; sequence < a.batch; ++sequence) {
    const int64_t start = a.cu_seqlens[sequence], end = a.cu_seqlens[sequence + 1];
    const int64_t from = start > first ? start : first, to = end < last ? end : last;
    if (from >= to) continue;
    float* total = sums + sequence * a.columns + left;
    auto add_rows = [&](int64_t c, int n) __attribute__((always_inline)) {
      Vec sum{}, error{};
      if (from != start) sum = load_n(total + c, n), error = load_n(lost + c, n);
      for (int64_t row = from; row < to; ++row) {
        Vec term = log1p(relu_with_nan(load_n(product + (row - first) * width + c, n)));
        if (a.twice) term = log1p(term);
        const Vec corrected = term - error, next = sum + corrected;  // Kahan's sum
        error = (next - sum) - corrected;
        error = error == error ? error : Vec{};  // after infinity
        sum = next;
      }
      store_n(total + c, sum, n);
      store_n(lost + c, error, n);
    };
    FASTENC_FOR_COLUMNS(width, add_rows);
  }
}

// d log(1 + relu(u)) / du = [u > 0] / (1 + u); a second logarithm divides by 1 + log(1 + u). A NaN stays.
void segment_log_sum_gradient(
    const SegmentLogSum& a, float* logits, const float* dsums, int64_t left, int64_t right) {
  for (int64_t sequence = 0; sequence < a.batch; ++sequence) {
    const float* given = dsums + sequence * a.columns + left;
    for (int64_t row = a.cu_seqlens[sequence]; row < a.cu_seqlens[sequence + 1]; ++row) {
      float* rows = logits + row * a.columns + left;
      auto differentiate = [&](int64_t c, int n) __attribute__((always_inline)) {
        const Vec u = load_n(rows + c, n);
        Vec divisor = u + 1.f;
        if (a.twice) divisor *= log1p(relu_with_nan(u)) + 1.f;
        store_n(rows + c, u <= Vec{} ? Vec{} : load_n(given + c, n) / divisor, n);
      };
      FASTENC_FOR_COLUMNS(right - left, differentiate);
    }
  }
}
