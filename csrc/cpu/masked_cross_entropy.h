// The pass for the gradient finds the row in the second-level cache.
template <class T>
static void masked_cross_entropy_row(const MaskedCrossEntropy& a, int64_t row) {
  const int64_t n = a.vocabulary, label = a.labels[row];
  const T* x = (const T*)a.logits + row * a.row_stride;
  Vec logit_sum{};  // sum of the logits, for label smoothing
  auto visit_block = [](int64_t, int64_t, float) {};
  auto visit = [&](int64_t c, int lanes) __attribute__((always_inline)) {
    if (a.label_smoothing > 0.f) logit_sum += load_n(x + c, lanes);
  };
  const SoftmaxSum softmax = softmax_sum(x, n, visit_block, visit);
  const float row_max = softmax.max;
  SoftmaxStatistics statistics;
  statistics.row_max = row_max;
  statistics.log_row_sum = (float)__builtin_log(softmax.sum);
  statistics.inverse = (float)(1. / softmax.sum);
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
