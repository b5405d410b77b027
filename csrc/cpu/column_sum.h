template <class T>
static void column_sum_rows(const T* x, int64_t width, int64_t begin, int64_t end, float* sums) {
  for (int64_t row = begin; row < end; ++row) {
    auto add = [&](int64_t c, int n) __attribute__((always_inline)) {
      store_n(sums + c, load_n(sums + c, n) + load_n(x + row * width + c, n), n);
    };
    FASTENC_FOR_COLUMNS(width, add);
  }
}

void column_sum(const void* x, int64_t width, bool bf16, int64_t begin, int64_t end, float* sums) {
  if (bf16)
    column_sum_rows((const bfloat16*)x, width, begin, end, sums);
  else
    column_sum_rows((const float*)x, width, begin, end, sums);
}
