// See ../global_window_attention.h.

// w, the window's share of a query's probabilities; 0 for a query without any key.
FASTENC_INLINE float window_share(float window_lse, float others_lse) {
  if (window_lse == -__builtin_inff()) return 0.f;
  return 1.f / (1.f + __builtin_expf(others_lse - window_lse));
}

template <class T>
static void merge_attention_forward_rows(const MergedAttention& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token)
    for (int64_t head = 0; head < a.num_heads; ++head) {
      const int64_t row = (token * a.num_heads + head) * a.head_dim, of_lse = head * a.tokens + token;
      const float share = window_share(a.window_lse[of_lse], a.others_lse[of_lse]);
      const T *window = (const T*)a.window + row, *others = (const T*)a.others + row;
      T* out = (T*)a.out + row;
      auto write = [&](int64_t c, int n) __attribute__((always_inline)) {
        const Vec other = load_n(others + c, n);
        store_n(out + c, other + (load_n(window + c, n) - other) * share, n);
      };
      FASTENC_FOR_COLUMNS(a.head_dim, write);
    }
}

// dwindow = w dout,  dothers = (1 - w) dout,  dwindow_lse = -dothers_lse = w (1 - w) dout . (out_1 - out_2)
template <class T>
static void merge_attention_backward_rows(const MergedAttention& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const float kept = a.key_bias[token] < 0.f ? 0.f : 1.f;
    for (int64_t head = 0; head < a.num_heads; ++head) {
      const int64_t row = (token * a.num_heads + head) * a.head_dim, of_lse = head * a.tokens + token;
      const float share = window_share(a.window_lse[of_lse], a.others_lse[of_lse]);
      const T *window = (const T*)a.window + row, *others = (const T*)a.others + row, *dout = (const T*)a.dout + row;
      T *dwindow = (T*)a.dwindow + row, *dothers = (T*)a.dothers + row;
      Vec dot{};
      auto write = [&](int64_t c, int n) __attribute__((always_inline)) {
        const Vec d = kept ? load_n(dout + c, n) : Vec{};
        dot += d * (load_n(window + c, n) - load_n(others + c, n));
        store_n(dwindow + c, d * share, n);
        store_n(dothers + c, d * (1.f - share), n);
      };
      FASTENC_FOR_COLUMNS(a.head_dim, write);
      const float dlse = share * (1.f - share) * sum(dot);
      a.dwindow_lse[of_lse] = dlse;
      a.dothers_lse[of_lse] = -dlse;
    }
  }
}

void merge_attention_forward(const MergedAttention& a, bool bf16, int64_t begin, int64_t end) {
  bf16 ? merge_attention_forward_rows<bfloat16>(a, begin, end) : merge_attention_forward_rows<float>(a, begin, end);
}

void merge_attention_backward(const MergedAttention& a, bool bf16, int64_t begin, int64_t end) {
  bf16 ? merge_attention_backward_rows<bfloat16>(a, begin, end) : merge_attention_backward_rows<float>(a, begin, end);
}
