// erf form:  gelu(u) = u * P(u),  gelu'(u) = P(u) + u * p(u), with the normal distribution P and density p.
// tanh form: gelu(u) = u * s(2k), s the logistic function, k = sqrt(2/pi) * (u + 0.044715 u^3).

// erf by a rational minimax approximation on [-3.83, 3.83] (the form that Eigen and XLA use), absolute
// error below 2e-7; beyond, erf is +-1 to within 6e-8.
FASTENC_INLINE Vec erf(Vec x) {
  const float edge = 3.832506856900711f;
  const Vec one = x > 0.f ? splat(1.f) : splat(-1.f);
  const VecI beyond = (x > edge) | (x < -edge);
  const Vec s = x * x;
  Vec p = splat(-2.72614225801306e-10f);
  p = p * s + 2.77068142495902e-08f;
  p = p * s + -2.10102402082508e-06f;
  p = p * s + -5.69250639462346e-05f;
  p = p * s + -7.34990630326855e-04f;
  p = p * s + -2.95459980854025e-03f;
  p = p * s + -1.60960333262415e-02f;
  Vec q = splat(-1.45660718464996e-05f);
  q = q * s + -2.13374055278905e-04f;
  q = q * s + -1.68282697438203e-03f;
  q = q * s + -7.37332916720468e-03f;
  q = q * s + -1.42647390514189e-02f;
  return beyond ? one : x * p / q;
}

FASTENC_INLINE Vec normal_cdf(Vec u) { return erf(u * 0.70710678118654752f) * 0.5f + 0.5f; }

FASTENC_INLINE Vec exp_minus_2k(Vec u) { return exp(u * -1.5957691216057308f * (u * u * 0.044715f + 1.f)); }

template <class T>
static void bias_gelu_forward_rows(const BiasGelu& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + row * a.width;
    T* y = (T*)a.out + row * a.width;
    auto write = [&](int64_t c, int n) __attribute__((always_inline)) {
      Vec u = load_n(x + c, n);
      if (a.bias) u += load_n(a.bias + c, n);
      store_n(y + c, a.tanh ? u / (exp_minus_2k(u) + 1.f) : u * normal_cdf(u), n);
    };
    FASTENC_FOR_COLUMNS(a.width, write);
  }
}

template <class T>
static void bias_gelu_backward_rows(const BiasGelu& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + row * a.width;
    const T* dy = (const T*)a.dy + row * a.width;
    T* dx = (T*)a.out + row * a.width;
    auto write = [&](int64_t c, int n) __attribute__((always_inline)) {
      Vec u = load_n(x + c, n);
      if (a.bias) u += load_n(a.bias + c, n);
      Vec slope;
      if (a.tanh) {
        const Vec e = exp_minus_2k(u);
        const Vec gate = splat(1.f) / (e + 1.f);  // and 1 - gate = e * gate without cancellation
        const Vec dk2 = 1.5957691216057308f * (u * u * (3.f * 0.044715f) + 1.f);
        slope = gate + u * gate * (e * gate) * dk2;
      } else {
        slope = normal_cdf(u) + u * 0.3989422804014327f * exp(u * u * -0.5f);
      }
      const Vec d = load_n(dy + c, n) * slope;
      store_n(dx + c, d, n);
      if (a.dbias) store_n(a.dbias + c, load_n(a.dbias + c, n) + d, n);
    };
    FASTENC_FOR_COLUMNS(a.width, write);
  }
}

void bias_gelu_forward(const BiasGelu& a, bool bf16, int64_t begin, int64_t end) {
  bf16 ? bias_gelu_forward_rows<bfloat16>(a, begin, end) : bias_gelu_forward_rows<float>(a, begin, end);
}

void bias_gelu_backward(const BiasGelu& a, bool bf16, int64_t begin, int64_t end) {
  bf16 ? bias_gelu_backward_rows<bfloat16>(a, begin, end) : bias_gelu_backward_rows<float>(a, begin, end);
}
