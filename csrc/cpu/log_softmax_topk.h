// The greatest values are searched in the blocks of the softmax's pass. After the first blocks, few have a value that is
// greater than those that are held.

// The greatest values so far, descending.
struct Greatest {
  float* values;
  int64_t* indices;
  int64_t held, count;

  bool takes(float value) const { return held < count || value > values[held - 1]; }
  void insert(float value, int64_t index) {
    int64_t at = held < count ? held++ : held - 1;
    for (; at > 0 && value > values[at - 1]; --at) {
      values[at] = values[at - 1];
      indices[at] = indices[at - 1];
    }
    values[at] = value;
    indices[at] = index;
  }
};

void log_softmax_topk(const LogSoftmaxTopk& a, int64_t row) {
  const float* x = a.x + row * a.stride;
  Greatest greatest{a.values + row * a.count, a.indices + row * a.count, 0, a.count};
  auto visit_block = [&](int64_t begin, int64_t count, float block_max) {
    if (!greatest.takes(block_max)) return;
    for (int64_t c = begin; c < begin + count; ++c)
      if (greatest.takes(x[c])) greatest.insert(x[c], c);
  };
  auto visit = [](int64_t, int) {};
  const SoftmaxSum softmax = softmax_sum(x, a.width, visit_block, visit);
  const float log_sum = (float)__builtin_log(softmax.sum);
  for (int64_t i = 0; i < a.count; ++i) greatest.values[i] = greatest.values[i] - softmax.max - log_sum;
}
