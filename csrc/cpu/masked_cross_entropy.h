// A row is walked once from memory: short blocks (long sums would lose digits) give their maximum and, while
// they are there, their share of the sum of exponentials (rescaled when a later block has a larger
// maximum). The gradient's pass over the row then finds it in the second-level cache.

constexpr int64_t kBlockColumns = 16 * kLanes;

template <class T>
static void masked_cross_entropy_row(const MaskedCrossEntropy& a, int64_t row) {
  const int64_t n = a.vocabulary, label = a.labels[row];
  const T* x = (const T*)a.logits + row * n;
  float peak = -__builtin_inff();
  double total = 0.;
  Vec plain{};  // sum of the logits, for label smoothing
  for (int64_t begin = 0; begin < n; begin += kBlockColumns) {
    const int64_t count = n - begin < kBlockColumns ? n - begin : kBlockColumns;
    Vec top = splat(-__builtin_inff());
    auto raise = [&](int64_t c, int lanes) __attribute__((always_inline)) {
      top = max(load_n(x + begin + c, lanes, -__builtin_inff()), top);
    };
    FASTENC_FOR_COLUMNS(count, raise);
    const float block_peak = maximum(top);
    if (block_peak > peak) {
      total *= __builtin_expf(peak - block_peak);
      peak = block_peak;
    }
    // A block of -inf only would otherwise meet -inf - -inf.
    const float shift = peak == -__builtin_inff() ? 0.f : peak;
    Vec sums{};
    auto add = [&](int64_t c, int lanes) __attribute__((always_inline)) {
      sums += exp(load_n(x + begin + c, lanes, -__builtin_inff()) - shift);
      if (a.label_smoothing > 0.f) plain += load_n(x + begin + c, lanes);
    };
    FASTENC_FOR_COLUMNS(count, add);
    total += sum(sums);
  }
  // Differences to the peak stay exact where the log-sum-exp itself, of a large peak, would be rounded.
  const float log_total = (float)__builtin_log(total), lse = peak + log_total;
  const float target = to_float(x[label]) - peak;
  float loss = log_total - target;
  if (a.label_smoothing > 0.f)
    loss = (1.f - a.label_smoothing) * loss + a.label_smoothing * (log_total - (sum(plain) / (float)n - peak));
  a.losses[row] = loss + a.z_loss * lse * lse;
  if (!a.dlogits) return;

  // dx_j = scale * (p_j * (1 + 2 * z_loss * lse) - label_smoothing / n), and -(1 - label_smoothing) at the label.
  T* dx = (T*)a.dlogits + row * n;
  const float from_z = 2.f * a.z_loss * lse, inverse = (float)(1. / total);
  const float p_scale = a.scale * inverse * (1.f + from_z);
  const float everywhere = a.scale * a.label_smoothing / (float)n;
  const float p = __builtin_expf(target) * inverse;
  const float at_label =
      a.scale * ((p - 1.f) + a.label_smoothing * ((float)(n - 1) / (float)n) + p * from_z);
  auto write = [&](int64_t c, int lanes) __attribute__((always_inline)) {
    store_n(dx + c, exp(load_n(x + c, lanes) - peak) * p_scale - everywhere, lanes);
  };
  FASTENC_FOR_COLUMNS(n, write);
  from_float(dx + label, at_label);
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
