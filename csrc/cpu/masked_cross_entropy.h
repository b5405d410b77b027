// A row is read once from memory, in short blocks, because long sums would lose digits. Each block gives its maximum
// and, while it is in the cache, its sum of exponentials. A later block with a larger maximum rescales the row's sum.
// The pass for the gradient then finds the row in the second-level cache.

constexpr int64_t kBlockColumns = 16 * kLanes;

template <class T>
static void masked_cross_entropy_row(const MaskedCrossEntropy& a, int64_t row) {
  const int64_t n = a.vocabulary, label = a.labels[row];
  const T* x = (const T*)a.logits + row * a.row_stride;
  float row_max = -__builtin_inff();
  double row_sum = 0.;
  Vec logit_sum{};  // sum of the logits, for label smoothing
  for (int64_t begin = 0; begin < n; begin += kBlockColumns) {
    const int64_t count = n - begin < kBlockColumns ? n - begin : kBlockColumns;
    Vec top = splat(-__builtin_inff());
    auto raise = [&](int64_t c, int lanes) __attribute__((always_inline)) {
      top = max(load_n(x + begin + c, lanes, -__builtin_inff()), top);
    };
    FASTENC_FOR_COLUMNS(count, raise);
    const float block_max = maximum(top);
    if (block_max > row_max) {
      row_sum *= __builtin_expf(row_max - block_max);
      row_max = block_max;
    }
    // While all logits are -inf, subtract 0: -inf - -inf would be NaN.
    const float shift = row_max == -__builtin_inff() ? 0.f : row_max;
    Vec sums{};
    auto add = [&](int64_t c, int lanes) __attribute__((always_inline)) {
      sums += exp(load_n(x + begin + c, lanes, -__builtin_inff()) - shift);
      if (a.label_smoothing > 0.f) logit_sum += load_n(x + begin + c, lanes);
    };
    FASTENC_FOR_COLUMNS(count, add);
    row_sum += sum(sums);
  }
  SoftmaxStatistics statistics;
  statistics.row_max = row_max;
  statistics.log_row_sum = (float)__builtin_log(row_sum);
  statistics.inverse = (float)(1. / row_sum);
  statistics.mean = sum(logit_sum) / (float)n;
  statistics.target = to_float(x[label]) - row_max;
  statistics.target_exp = __builtin_expf(statistics.target);
  const RowTerms terms = row_terms(a, statistics, a.divisor ? 1.f / (float)*a.divisor : 1.f);
  a.losses[row] = terms.loss;
  if (!a.dlogits) return;

  T* dx = (T*)a.dlogits + row * a.row_stride;
  auto write = [&](int64_t c, int lanes) __attribute__((always_inline)) {
    store_n(dx + c, exp(load_n(x + c, lanes) - row_max) * terms.factor - terms.everywhere, lanes);
  };
  FASTENC_FOR_COLUMNS(n, write);
  from_float(dx + label, terms.at_label);
}

void masked_cross_entropy(const MaskedCrossEntropy& a, bool bf16, int64_t row) {
  bf16 ? masked_cross_entropy_row<bfloat16>(a, row) : masked_cross_entropy_row<float>(a, row);
}

template <class T>
static void scale(T* row, int64_t width, float factor) {
  auto write = [&](int64_t c, int lanes) __attribute__((always_inline)) {
    store_n(row + c, load_n(row + c, lanes) * factor, lanes);
  };
  FASTENC_FOR_COLUMNS(width, write);
}

void scale_row(void* row, bool bf16, int64_t width, float factor) {
  bf16 ? scale((bfloat16*)row, width, factor) : scale((float*)row, width, factor);
}
