template <class T, Activation kind>
static void bias_gelu_forward_rows(const BiasGelu& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + row * a.width;
    T* y = (T*)a.out + row * a.width;
    auto write = [&](int64_t c, int n) __attribute__((always_inline)) {
      Vec u = load_n(x + c, n);
      if (a.bias) u += load_n(a.bias + c, n);
      store_n(y + c, activate<kind>(u), n);
    };
    FASTENC_FOR_COLUMNS(a.width, write);
  }
}

template <class T, Activation kind>
static void bias_gelu_backward_rows(const BiasGelu& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + row * a.width;
    const T* dy = (const T*)a.dy + row * a.width;
    T* dx = (T*)a.out + row * a.width;
    auto write = [&](int64_t c, int n) __attribute__((always_inline)) {
      Vec u = load_n(x + c, n);
      if (a.bias) u += load_n(a.bias + c, n);
      const Vec d = load_n(dy + c, n) * activate_with_slope<kind>(u).slope;
      store_n(dx + c, d, n);
      if (a.dbias) store_n(a.dbias + c, load_n(a.dbias + c, n) + d, n);
    };
    FASTENC_FOR_COLUMNS(a.width, write);
  }
}

void bias_gelu_forward(const BiasGelu& a, bool bf16, int64_t begin, int64_t end) {
  FASTENC_CALL_ROWS(bias_gelu_forward_rows, bf16, a.activation, a, begin, end);
}

void bias_gelu_backward(const BiasGelu& a, bool bf16, int64_t begin, int64_t end) {
  FASTENC_CALL_ROWS(bias_gelu_backward_rows, bf16, a.activation, a, begin, end);
}
