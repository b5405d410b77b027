// Activations act(u) = u * gate(u), with their slopes gate(u) + u * gate'(u):
// gelu:      gate = P(u), the normal distribution, of density p.
// gelu_tanh: gate = s(2k), s the logistic function, k = sqrt(2/pi) * (u + 0.044715 u^3).
// silu:      gate = s(u).
// relu:      gate = 1 for u > 0, else 0.

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

// e^-z, where the gate is s(z). It overflows to infinity, so that the gate of the lowest number is 0.
template <Activation kind>
FASTENC_INLINE Vec exp_minus_argument(Vec u) {
  if constexpr (kind == Activation::silu) return exp(-u);
  return exp(u * -1.5957691216057308f * (u * u * 0.044715f + 1.f));
}

template <Activation kind>
FASTENC_INLINE Vec activate(Vec u) {
  if constexpr (kind == Activation::gelu) return u * normal_cdf(u);
  if constexpr (kind == Activation::relu) return u < 0.f ? Vec{} : u;  // NaN stays NaN
  return u / (exp_minus_argument<kind>(u) + 1.f);
}

struct Slope {
  Vec value, slope;
};

template <Activation kind>
FASTENC_INLINE Slope activate_with_slope(Vec u) {
  if constexpr (kind == Activation::gelu) {
    const Vec gate = normal_cdf(u);
    return {u * gate, gate + u * 0.3989422804014327f * exp(u * u * -0.5f)};
  }
  if constexpr (kind == Activation::relu) return {u < 0.f ? Vec{} : u, u > 0.f ? splat(1.f) : Vec{}};
  const Vec e = exp_minus_argument<kind>(u);
  const Vec gate = splat(1.f) / (e + 1.f);
  // 1 - gate without cancellation; where e is infinite the product is NaN, and min gives 1.
  Vec from_gate = u * gate * min(e * gate, splat(1.f));
  if constexpr (kind == Activation::gelu_tanh)  // for large |u| from_gate is 0, which an infinite factor would make NaN
    from_gate *= 1.5957691216057308f * (min(u * u, splat(1e4f)) * (3.f * 0.044715f) + 1.f);
  return {u * gate, gate + from_gate};
}

// Calls rows<storage type, activation>(arguments).
#define FASTENC_CALL_ROWS(rows, bf16, activation, ...)                                            \
  do {                                                                                            \
    switch (activation) {                                                                         \
      case Activation::gelu:                                                                      \
        bf16 ? rows<bfloat16, Activation::gelu>(__VA_ARGS__)                                      \
             : rows<float, Activation::gelu>(__VA_ARGS__);                                        \
        break;                                                                                    \
      case Activation::gelu_tanh:                                                                 \
        bf16 ? rows<bfloat16, Activation::gelu_tanh>(__VA_ARGS__)                                 \
             : rows<float, Activation::gelu_tanh>(__VA_ARGS__);                                   \
        break;                                                                                    \
      case Activation::silu:                                                                      \
        bf16 ? rows<bfloat16, Activation::silu>(__VA_ARGS__)                                      \
             : rows<float, Activation::silu>(__VA_ARGS__);                                        \
        break;                                                                                    \
      case Activation::relu:                                                                      \
        bf16 ? rows<bfloat16, Activation::relu>(__VA_ARGS__)                                      \
             : rows<float, Activation::relu>(__VA_ARGS__);                                        \
    }                                                                                             \
  } while (0)
