// The denominator of a row's softmax. The row is read once from memory, in short blocks, because long sums would lose
// digits. Each block gives its maximum and, while it is in the cache, its sum of exponentials. A later block with a larger
// maximum rescales the row's sum.

constexpr int64_t kBlockColumns = 16 * kLanes;

// sum = sum_c exp(x[c] - max).
struct SoftmaxSum {
  float max;
  double sum;
};

// visit_block(first column, columns, maximum) is called for each block, visit(column, lanes) for each vector.
template <class T, class VisitBlock, class Visit>
FASTENC_INLINE SoftmaxSum softmax_sum(const T* x, int64_t width, VisitBlock visit_block, Visit visit) {
  SoftmaxSum row{-__builtin_inff(), 0.};
  for (int64_t begin = 0; begin < width; begin += kBlockColumns) {
    const int64_t count = width - begin < kBlockColumns ? width - begin : kBlockColumns;
    Vec top = splat(-__builtin_inff());
    auto raise = [&](int64_t c, int lanes) __attribute__((always_inline)) {
      top = max(load_n(x + begin + c, lanes, -__builtin_inff()), top);
    };
    FASTENC_FOR_COLUMNS(count, raise);
    const float block_max = maximum(top);
    visit_block(begin, count, block_max);
    if (block_max > row.max) {
      row.sum *= __builtin_expf(row.max - block_max);
      row.max = block_max;
    }
    // While all values are -inf, subtract 0: -inf - -inf would be NaN.
    const float shift = row.max == -__builtin_inff() ? 0.f : row.max;
    Vec sums{};
    auto add = [&](int64_t c, int lanes) __attribute__((always_inline)) {
      sums += exp(load_n(x + begin + c, lanes, -__builtin_inff()) - shift);
      visit(begin + c, lanes);
    };
    FASTENC_FOR_COLUMNS(count, add);
    row.sum += sum(sums);
  }
  return row;
}
