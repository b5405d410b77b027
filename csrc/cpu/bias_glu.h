template <class T, Activation kind>
static void bias_glu_forward_rows(const BiasGlu& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + row * 2 * a.width;
    T* y = (T*)a.out + row * a.width;
    auto write = [&](int64_t c, int n) __attribute__((always_inline)) {
      Vec u = load_n(x + c, n), v = load_n(x + a.width + c, n);
      if (a.bias) {
        u += load_n(a.bias + c, n);
        v += load_n(a.bias + a.width + c, n);
      }
      store_n(y + c, activate<kind>(u) * v, n);
    };
    FASTENC_FOR_COLUMNS(a.width, write);
  }
}

template <class T, Activation kind>
static void bias_glu_backward_rows(const BiasGlu& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + row * 2 * a.width;
    const T* dy = (const T*)a.dy + row * a.width;
    T* dx = (T*)a.out + row * 2 * a.width;
    auto write = [&](int64_t c, int n) __attribute__((always_inline)) {
      Vec u = load_n(x + c, n), v = load_n(x + a.width + c, n);
      if (a.bias) {
        u += load_n(a.bias + c, n);
        v += load_n(a.bias + a.width + c, n);
      }
      const Vec d = load_n(dy + c, n);
      const Slope act = activate_with_slope<kind>(u);
      const Vec du = d * v * act.slope, dv = d * act.value;
      store_n(dx + c, du, n);
      store_n(dx + a.width + c, dv, n);
      if (a.dbias) {
        store_n(a.dbias + c, load_n(a.dbias + c, n) + du, n);
        store_n(a.dbias + a.width + c, load_n(a.dbias + a.width + c, n) + dv, n);
      }
    };
    FASTENC_FOR_COLUMNS(a.width, write);
  }
}

void bias_glu_forward(const BiasGlu& a, bool bf16, int64_t begin, int64_t end) {
  FASTENC_CALL_ROWS(bias_glu_forward_rows, bf16, a.activation, a, begin, end);
}

void bias_glu_backward(const BiasGlu& a, bool bf16, int64_t begin, int64_t end) {
  FASTENC_CALL_ROWS(bias_glu_backward_rows, bf16, a.activation, a, begin, end);
}
